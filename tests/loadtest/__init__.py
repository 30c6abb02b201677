"""The load tests' own machinery."""
