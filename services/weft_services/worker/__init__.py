"""A worker that holds both roles: one engine and one pool behind the doors of prefill and of decode."""
