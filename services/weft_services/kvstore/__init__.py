"""Owns the node's Mooncake Store and knows which KV blocks lie in it; the blocks' bytes never pass through here."""
