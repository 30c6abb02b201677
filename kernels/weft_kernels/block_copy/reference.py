"""Meaning of gathering and scattering blocks."""

from __future__ import annotations

from torch import Tensor


def gather_blocks_reference(pool: Tensor, blocks: Tensor) -> Tensor:
    return pool[blocks].contiguous()


def scatter_blocks_reference(buffer: Tensor, pool: Tensor, blocks: Tensor) -> None:
    pool[blocks] = buffer
