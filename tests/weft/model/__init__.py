"""Configs, shapes and the forward pass."""
