"""Whole meshes of real processes."""
