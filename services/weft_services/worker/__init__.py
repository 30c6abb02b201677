"""A worker with both roles: prefill and decode services on one engine and one pool."""
