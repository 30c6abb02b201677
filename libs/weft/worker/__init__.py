"""Shared parts of prefill and decode workers: fleet membership, weight loading, engine, and store client."""
