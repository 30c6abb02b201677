"""KV blocks: keys, the pool that owns them, and their transfer between machines."""
