"""The decode worker: takes sequences from gateways, fetches their prompts' KV from prefill workers, and generates."""
