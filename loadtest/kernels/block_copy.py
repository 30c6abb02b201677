"""Pool blocks to and from a contiguous buffer. `python -m loadtest.kernels.block_copy`"""

from __future__ import annotations

import sys

import torch

from loadtest.kernels.roofline import Work, report
from weft_kernels.block_copy import gather_blocks, gather_blocks_reference, scatter_blocks, scatter_blocks_reference


def works() -> list[Work]:
    """An 8B model's blocks of 8 MiB: a short prompt, 4k and 16k tokens."""
    pool = torch.zeros(512, 8, 32, 2, 64, 128, device="cuda", dtype=torch.bfloat16)
    return [make_work(pool, count, is_gather) for count in (4, 64, 256) for is_gather in (True, False)]


def make_work(pool: torch.Tensor, count: int, is_gather: bool) -> Work:
    """Each block is read and written once."""
    blocks = torch.randperm(len(pool), device="cuda")[:count]
    buffer = gather_blocks(pool, blocks)
    if is_gather:
        return Work(
            f"gather {count} blocks",
            lambda: gather_blocks(pool, blocks),
            2 * buffer.nbytes,
            0,
            lambda: gather_blocks_reference(pool, blocks),
        )
    return Work(
        f"scatter {count} blocks",
        lambda: scatter_blocks(buffer, pool, blocks),
        2 * buffer.nbytes,
        0,
        lambda: scatter_blocks_reference(buffer, pool, blocks),
    )


if __name__ == "__main__":
    sys.exit(report("block copies", works))
