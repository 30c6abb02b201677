"""The weights service."""
