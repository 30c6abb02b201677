"""KV blocks: keys, the pool that owns them, and the ways they move between machines."""
