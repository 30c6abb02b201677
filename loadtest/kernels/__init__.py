"""Benchmarks of single kernels beside the limit of the machine. Nothing here passes or fails."""
