"""Integer helpers for launches. Triton's versions also work in kernels, and take ten times as long on the host."""

from __future__ import annotations


def cdiv(number: int, divisor: int) -> int:
    """Return number / divisor, rounded up."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()
