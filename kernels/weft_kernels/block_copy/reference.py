"""What gathering and scattering blocks means."""

from __future__ import annotations

from torch import Tensor


def gather_blocks_reference(pool: Tensor, blocks: Tensor) -> Tensor:
    """See `weft_kernels.block_copy.gather_blocks`."""
    return pool[blocks].contiguous()


def scatter_blocks_reference(buffer: Tensor, pool: Tensor, blocks: Tensor) -> None:
    """See `weft_kernels.block_copy.scatter_blocks`."""
    pool[blocks] = buffer
