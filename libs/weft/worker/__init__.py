"""What a prefill and a decode worker share: joining the fleet, loading weights, running an engine, the store."""
