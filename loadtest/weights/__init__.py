"""Benchmarks of bundles and of loading."""
