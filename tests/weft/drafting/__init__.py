"""Drafters and the choice of drafts, without an engine."""
