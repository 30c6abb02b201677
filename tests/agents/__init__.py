"""Agents of other people."""
