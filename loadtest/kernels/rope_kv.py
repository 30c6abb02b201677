"""Rotation and KV write in one pass. `python -m loadtest.kernels.rope_kv`"""

from __future__ import annotations

import sys

import torch

from loadtest.kernels.roofline import Work, report
from weft_kernels.rope_kv import rope_kv
from weft_kernels.rope_kv.reference import rope_kv_reference

BLOCK_TOKENS = 64


def works() -> list[Work]:
    """Heads of an 8B model, both orders of pairs."""
    return [make_work(rows, order) for rows in (1, 64, 2048, 8192) for order in (False, True)]


def make_work(rows: int, is_interleaved: bool) -> Work:
    """The projection is read once; queries, keys and values are written once."""
    num_heads, kv_heads, dim = 32, 8, 128
    qkv = torch.randn(rows, num_heads + 2 * kv_heads, dim, device="cuda", dtype=torch.bfloat16)
    cos, sin = torch.randn(2, rows, dim, device="cuda", dtype=torch.bfloat16)
    num_blocks = max(4, 2 * rows // BLOCK_TOKENS)
    pool = torch.zeros(num_blocks, kv_heads, 2, 2, BLOCK_TOKENS, dim, device="cuda", dtype=torch.bfloat16)
    slots = torch.randperm(num_blocks * BLOCK_TOKENS, device="cuda")[:rows]
    return Work(
        f"rope_kv {rows} rows, {'neighbours' if is_interleaved else 'halves'}",
        lambda: rope_kv(qkv, cos, sin, pool, 1, slots, is_interleaved=is_interleaved),
        2 * qkv.nbytes + cos.nbytes,  # half of each row of angles
        0,
        lambda: rope_kv_reference(qkv, cos, sin, pool, 1, slots, is_interleaved),
    )


if __name__ == "__main__":
    sys.exit(report("rotation and KV write", works))
