"""Rotary embedding of queries and keys, with keys and values written where they stay."""

from __future__ import annotations

from torch import Tensor

from weft_kernels.kv_write import kv_write
from weft_kernels.rope import rope
from weft_kernels.rope_kv.reference import rope_kv_reference


def rope_kv(
    qkv: Tensor, cos: Tensor, sin: Tensor, pool: Tensor, layer: int, slots: Tensor, *, is_interleaved: bool = False
) -> Tensor:
    """Rotate the queries and the keys of packed rows, write keys and values into the pool, return the queries.

    qkv: [T, heads + 2 kv_heads, dim], contiguous: queries, keys, values. pool: [blocks, kv_heads, layers, 2,
    block_tokens, dim], written at slots [T] int64 of `layer`. cos, sin: [T, dim / 2 or more], the angle of pair i in
    column i. A pair is (x[i], x[i + dim/2]), or (x[2i], x[2i + 1]) when `is_interleaved`.
    Returns [T, heads, dim], contiguous.
    """
    if qkv.is_cuda:
        from weft_kernels.rope_kv.kernel import rope_kv_kernel

        return rope_kv_kernel(qkv, cos, sin, pool, layer, slots, is_interleaved)
    if is_interleaved or cos.shape[1] != qkv.shape[2]:
        return rope_kv_reference(qkv, cos, sin, pool, layer, slots, is_interleaved)
    num_rotated = qkv.shape[1] - pool.shape[1]
    num_heads = num_rotated - pool.shape[1]
    rotated = rope(qkv[:, :num_rotated], cos, sin)
    kv_write(rotated[:, num_heads:], qkv[:, num_rotated:], pool, layer, slots)
    return rotated[:, :num_heads].contiguous()
