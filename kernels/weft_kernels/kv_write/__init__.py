"""Writing new keys and values into pool blocks."""

from __future__ import annotations

from torch import Tensor

from weft_kernels.kv_write.reference import kv_write_reference


def kv_write(k: Tensor, v: Tensor | None, pool: Tensor, layer: int, slots: Tensor) -> None:
    """pool[slots[t] // block_tokens, h, layer, 0 or 1, slots[t] % block_tokens] = k[t, h] or v[t, h], in place.

    k, v: [T, kv_heads, dim]. pool: [blocks, kv_heads, layers, 2, block_tokens, dim], or 1 for the 2 and no v.
    slots: [T] int64, all different.
    """
    kv_write_reference(k, v, pool, layer, slots)
