"""Load on the KV cache: hand-off, tiers and their index."""
