"""Load on the KV cache: hand-off and tiers."""
