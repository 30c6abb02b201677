"""How a figure stands beside what was promised, in the same words everywhere."""

from __future__ import annotations


def verdict(is_met: bool, bar: str) -> str:
    """As in "bar 0.9x: met"."""
    return f"bar {bar}: {'met' if is_met else 'SHORT'}"
