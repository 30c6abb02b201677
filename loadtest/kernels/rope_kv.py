"""Queries, keys and latent vectors on their way to attention, in one pass. `python -m loadtest.kernels.rope_kv`"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from loadtest.kernels.roofline import Work, report
from weft_kernels.latent_kv import latent_kv, latent_kv_reference
from weft_kernels.rope_kv import ROTATED, HeadTransform, rope_kv, rope_kv_reference

BLOCK_TOKENS = 64
BF16 = torch.bfloat16


def works() -> list[Work]:
    """Heads of an 8B model, rotated only and normed before (Qwen3) or behind it (Llama 4), and DeepSeek-V3's."""
    q_norm, k_norm = torch.randn(2, 128, device="cuda", dtype=BF16)
    rules = {
        "rotated": ROTATED,
        "Qwen3": HeadTransform((q_norm, k_norm), eps=1e-6),
        "Llama 4": HeadTransform(is_normed_last=True, eps=1e-5),
    }
    sizes = (1, 64, 2048, 8192)
    return [_heads(rows, name, rule) for rows in sizes for name, rule in rules.items()] + list(map(_latent, sizes))


def _places(rows: int) -> tuple[int, Tensor]:
    num_blocks = max(4, 2 * rows // BLOCK_TOKENS)
    return num_blocks, torch.randperm(num_blocks * BLOCK_TOKENS, device="cuda")[:rows]


def _heads(rows: int, name: str, rule: HeadTransform) -> Work:
    """The projection is read once; queries, keys and values are written once."""
    num_heads, kv_heads, dim = 32, 8, 128
    qkv = torch.randn(rows, num_heads + 2 * kv_heads, dim, device="cuda", dtype=BF16)
    cos, sin = torch.randn(2, rows, dim, device="cuda", dtype=BF16)
    num_blocks, slots = _places(rows)
    pool = torch.zeros(num_blocks, kv_heads, 2, 2, BLOCK_TOKENS, dim, device="cuda", dtype=BF16)
    return Work(
        f"rope_kv {rows} rows, {name}",
        lambda: rope_kv(qkv, cos, sin, pool, 1, slots, rule),
        2 * qkv.nbytes + cos.nbytes,  # half of each row of angles
        0,
        lambda: rope_kv_reference(qkv, cos, sin, pool, 1, slots, rule),
    )


def _latent(rows: int) -> Work:
    num_heads, nope, rank, dim = 128, 128, 512, 64
    down = torch.randn(rows, rank + dim, device="cuda", dtype=BF16)
    q = torch.randn(rows, num_heads, nope + dim, device="cuda", dtype=BF16)[..., nope:]
    norm, angles = torch.randn(rank, device="cuda", dtype=BF16), torch.randn(2, rows, dim, device="cuda", dtype=BF16)
    num_blocks, slots = _places(rows)
    pool = torch.zeros(num_blocks, 1, 2, 1, BLOCK_TOKENS, rank + dim, device="cuda", dtype=BF16)
    tensors = down, q, norm, 1e-6, (angles[0], angles[1]), pool, 1, slots
    return Work(
        f"latent_kv {rows} rows, 128 heads",
        lambda: latent_kv(*tensors),
        2 * down.nbytes + 2 * q.numel() * q.itemsize + angles.nbytes // 2,
        0,
        lambda: latent_kv_reference(*tensors),
    )


if __name__ == "__main__":
    sys.exit(report("norms, rotation and KV write", works))
