"""Recorded draft heads of published code, and the script that records them."""
