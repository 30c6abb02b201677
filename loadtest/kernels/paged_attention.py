"""Attention kernels: decode, verification, prefill, windows, latents. `python -m loadtest.kernels.paged_attention`"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from loadtest.kernels.roofline import Work, report
from weft_kernels.paged_attention.device_batch import MAX_DECODE_ROWS, AttentionShape, PagedTensors

BLOCK_TOKENS = 64
# query heads, key heads, dim: one GPU's share of an 8B and of a 70B model at TP 8; 0 key heads: a latent of 512 + 64
LAYOUTS = {"8B": (32, 8, 128), "70B/8": (8, 1, 128), "latent": (16, 0, 576)}
DECODES = [(1, 1, 1024), (8, 1, 1024), (32, 1, 1024), (256, 1, 1024), (1, 1, 32768), (32, 1, 32768), (32, 4, 1024)]
PREFILLS = [(1, 512, 512), (1, 2048, 2048), (1, 8192, 8192), (1, 2048, 32768), (8, 512, 512)]


def works() -> list[Work]:
    """All shapes, in bfloat16."""
    found = []
    for name, heads in LAYOUTS.items():
        found += [make_work(f"{name} decode", heads, shape) for shape in DECODES]
        found += [make_work(f"{name} prefill", heads, shape) for shape in PREFILLS]
    found += [make_work("8B decode, window 4096", LAYOUTS["8B"], (32, 1, 32768), 4096)]
    found += [make_work("8B prefill, window 4096", LAYOUTS["8B"], (1, 8192, 32768), 4096)]
    return found


def make_work(name: str, heads: tuple[int, int, int], batch: tuple[int, int, int], window: int = 0) -> Work:
    """`batch`: sequences, new rows of each, context of each."""
    from weft_kernels.paged_attention.decode import paged_attention_decode
    from weft_kernels.paged_attention.prefill import paged_attention_prefill

    num_heads, kv_heads, dim = heads
    num_seqs, rows, context = batch
    keys, values = make_pool(max(1, kv_heads), dim, num_seqs * context // BLOCK_TOKENS, is_latent=kv_heads == 0)
    q = torch.randn(num_seqs * rows, num_heads, dim, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(num_seqs * rows, num_heads, values.shape[3], device="cuda", dtype=torch.bfloat16)
    tensors = make_tensors(num_seqs, rows, context)
    shape = AttentionShape(dim**-0.5, window)
    kernel = paged_attention_decode if rows <= MAX_DECODE_ROWS else paged_attention_prefill
    # all keys of the window are read once; a row computes with those up to its own
    read = min(context, window + rows) if window else context
    seen = sum(min(context - rows + row + 1, window or context) for row in range(rows))
    stored = dim if kv_heads == 0 else 2 * dim
    return Work(
        f"{name} {num_seqs} x {rows} @ {context}",
        lambda: kernel(q, keys, values, tensors, shape, out),
        2.0 * num_seqs * read * max(1, kv_heads) * stored + q.nbytes + out.nbytes,
        2.0 * num_seqs * seen * num_heads * (dim + values.shape[3]),
    )


def make_pool(kv_heads: int, dim: int, num_blocks: int, is_latent: bool) -> tuple[Tensor, Tensor]:
    """Keys and values of the second of two layers, as they lie in the engine's pool."""
    parts = 1 if is_latent else 2
    pool = torch.randn(num_blocks, kv_heads, 2, parts, BLOCK_TOKENS, dim, device="cuda", dtype=torch.bfloat16)
    keys = pool[:, :, 1, 0]
    return keys, keys[..., :512] if is_latent else pool[:, :, 1, 1]


def make_tensors(num_seqs: int, rows: int, context: int) -> PagedTensors:
    """Blocks of all sequences mixed, as they are after a while."""
    table = torch.randperm(num_seqs * context // BLOCK_TOKENS, dtype=torch.int32, device="cuda").view(num_seqs, -1)
    starts = torch.arange(0, (num_seqs + 1) * rows, rows, dtype=torch.int32, device="cuda")
    return PagedTensors(starts, torch.full((num_seqs,), context, dtype=torch.int32, device="cuda"), table, rows)


if __name__ == "__main__":
    sys.exit(report("paged attention", works))
