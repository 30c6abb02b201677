"""Weights service: reads a checkpoint once per node, checks it, and keeps it in shared memory for the workers."""
