"""The engine of a worker: plan, execute, settle, one thread."""
