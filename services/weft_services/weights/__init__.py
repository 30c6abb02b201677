"""Reads a checkpoint once per node, checks it, and keeps it in host shared memory for the workers."""
