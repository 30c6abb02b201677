"""Rotary embedding of queries and keys, with keys and values written where they stay."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from weft_kernels.native import of_rows
from weft_kernels.rope_kv.reference import rope_kv_reference

_Sizes = ctypes.c_long * 7


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
    _, kv_heads, layers, parts, block_tokens, dim = pool.shape
    function = None if is_interleaved or cos.shape[1] != dim else of_rows("rope_kv", qkv, dim // 2)
    if function is None or not cos.is_contiguous() or not sin.is_contiguous():
        return rope_kv_reference(qkv, cos, sin, pool, layer, slots, is_interleaved)
    assert qkv.is_contiguous()
    assert qkv.dtype == cos.dtype == sin.dtype == pool.dtype
    num_heads = qkv.shape[1] - 2 * kv_heads
    q = qkv.new_empty(len(qkv), num_heads, dim)
    sizes = _Sizes(len(qkv), num_heads, kv_heads, dim, layers * parts, layer * parts, block_tokens)
    tensors = (each.data_ptr() for each in (qkv, cos, sin, pool, slots, q))
    function(*tensors, sizes, torch.get_num_threads())
    return q
