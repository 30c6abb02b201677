"""Meaning of writing keys and values into the pool."""

from __future__ import annotations

from torch import Tensor


def kv_write_reference(k: Tensor, v: Tensor | None, pool: Tensor, layer: int, slots: Tensor) -> None:
    block_tokens = pool.shape[4]
    blocks, offsets = slots // block_tokens, slots % block_tokens
    pool[:, :, layer, 0][blocks, :, offsets] = k
    if v is not None:
        pool[:, :, layer, 1][blocks, :, offsets] = v
