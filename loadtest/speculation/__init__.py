"""Measurements of speculative decoding."""
