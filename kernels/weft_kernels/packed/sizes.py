"""Sizes of launches. Triton's functions of these names are for kernels as well, and take ten times as long on a host,
which launches a prompt's products one by one while the GPU waits for them."""

from __future__ import annotations


def cdiv(number: int, divisor: int) -> int:
    """Rounded up."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """The least that is no less than `number`, 1 or more."""
    return 1 << (number - 1).bit_length()
