"""Checkpoints: reading, checking and sharing them in host memory."""
