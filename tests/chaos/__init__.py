"""The fault matrix: what a request is doing, times what goes wrong."""
