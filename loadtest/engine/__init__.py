"""Benchmarks of the engine itself, beside others where there are any. Nothing here passes or fails."""
