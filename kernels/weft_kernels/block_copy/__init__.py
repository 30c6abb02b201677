"""Copies whole pool blocks to and from one contiguous buffer, for KV transfers and storage tiers."""

from __future__ import annotations

from torch import Tensor


def gather_blocks(pool: Tensor, blocks: Tensor) -> Tensor:
    """buffer[i] = pool[blocks[i]]: a contiguous copy of the named blocks.

    pool: [num_blocks, ...]; what lies in one block must be contiguous, so `pool[:, first:end]`, the share of a range
    of heads, is good as well. blocks: [n] int64 on the pool's device. Returns [n, ...].
    """
    if pool.is_cuda:
        from weft_kernels.block_copy.kernel import gather_blocks_kernel

        return gather_blocks_kernel(pool, blocks)
    return gather_blocks_reference(pool, blocks)


def scatter_blocks(buffer: Tensor, pool: Tensor, blocks: Tensor) -> None:
    """pool[blocks[i]] = buffer[i], in place. buffer: [n, ...], contiguous; blocks: all different."""
    if pool.is_cuda:
        from weft_kernels.block_copy.kernel import scatter_blocks_kernel

        scatter_blocks_kernel(buffer, pool, blocks)
    else:
        scatter_blocks_reference(buffer, pool, blocks)


def gather_blocks_reference(pool: Tensor, blocks: Tensor) -> Tensor:
    return pool[blocks].contiguous()


def scatter_blocks_reference(buffer: Tensor, pool: Tensor, blocks: Tensor) -> None:
    pool[blocks] = buffer
