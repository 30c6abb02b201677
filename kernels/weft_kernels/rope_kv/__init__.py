"""Prepares queries and keys for attention, and writes keys and values into the pool."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft_kernels.kv_write import kv_write, kv_write_reference
from weft_kernels.layer_cache import LayerCache
from weft_kernels.native.row_kernels import row_kernel
from weft_kernels.rms_norm import rms_norm, rms_norm_reference
from weft_kernels.rope import rope, rope_reference


@dataclass(frozen=True, slots=True)
class HeadTransform:
    """Transform of a layer's queries and keys, in this order.

    norms: RMS norm weights [dim] of queries and of keys (Qwen3). is_rotated: rotary embedding by position.
    is_normed_last: an RMS norm without weights (Llama 4).
    """

    norms: tuple[Tensor, Tensor] | None = None
    is_rotated: bool = True
    is_normed_last: bool = False
    eps: float = 0.0


ROTATED = HeadTransform()


def rope_kv_reference(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: LayerCache,
    slots: Tensor,
    rule: HeadTransform,
    temperature: Tensor | None = None,
) -> Tensor:
    """Return the queries like `rope_kv`, but leave qkv unchanged."""
    kv_heads = cache.keys.shape[1]
    q, k, v = torch.split(qkv, [qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    if rule.norms is not None:
        q, k = (rms_norm_reference(*each, rule.eps) for each in zip((q, k), rule.norms, strict=True))
    if rule.is_rotated:
        q, k = (rope_reference(each.to(cos.dtype), cos, sin).to(qkv.dtype) for each in (q, k))
    if rule.is_normed_last:
        q, k = (rms_norm_reference(each, each.new_ones(each.shape[-1]), rule.eps) for each in (q, k))
    kv_write_reference(k, v, cache, slots)
    return (q if temperature is None else (q * temperature).to(q.dtype)).contiguous()


__all__ = ["ROTATED", "HeadTransform", "rope_kv"]


def rope_kv(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: LayerCache,
    slots: Tensor,
    rule: HeadTransform = ROTATED,
    temperature: Tensor | None = None,
) -> Tensor:
    """Apply the transform to packed rows, write keys and values into the pool, return the queries.

    qkv: [T, heads + 2 kv_heads, dim], contiguous: queries, keys, values; overwritten.
    cos, sin: [T, dim], both halves alike, float32 or of qkv's dtype; a pair is (x[i], x[i + dim/2]).
    cache: keys and values [pages, kv_heads, block_tokens, dim], written at slots [T] int64.
    temperature: [T, 1, 1] float32 factor for the final queries.
    Returns [T, heads, dim], contiguous.
    """
    if qkv.is_cuda:
        from weft_kernels.rope_kv.kernel import rope_kv_kernel

        return rope_kv_kernel(qkv, cos, sin, cache, slots, rule, temperature)
    kv_heads = cache.keys.shape[1]
    num_heads = qkv.shape[1] - 2 * kv_heads
    if rule.norms is not None:
        for some, weight in zip(
            (qkv[:, :num_heads], qkv[:, num_heads : num_heads + kv_heads]), rule.norms, strict=True
        ):
            some.copy_(rms_norm(some, weight, rule.eps))
    if rule.is_rotated and not rule.is_normed_last and temperature is None and cos.dtype == qkv.dtype:
        return _rotate_and_write(qkv, cos, sin, cache, slots)
    rotated = qkv[:, : num_heads + kv_heads]
    if rule.is_rotated:
        rotated = rope(rotated.to(cos.dtype), cos, sin).to(qkv.dtype)
    if rule.is_normed_last:
        rotated = rms_norm(rotated, rotated.new_ones(rotated.shape[-1]), rule.eps)
    kv_write(rotated[:, num_heads:], qkv[:, num_heads + kv_heads :], cache, slots)
    q = rotated[:, :num_heads]
    return (q if temperature is None else (q * temperature).to(q.dtype)).contiguous()


def _rotate_and_write(qkv: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache, slots: Tensor) -> Tensor:
    _, kv_heads, _, dim = cache.keys.shape
    function = row_kernel("rope_kv", qkv, dim // 2)
    if function is None or not cos.is_contiguous() or not sin.is_contiguous():
        return rope_kv_reference(qkv, cos, sin, cache, slots, ROTATED)
    assert qkv.is_contiguous()
    assert qkv.dtype == cos.dtype == sin.dtype == cache.keys.dtype
    assert cache.values.shape[3] == dim
    num_heads = qkv.shape[1] - 2 * kv_heads
    q = qkv.new_empty(len(qkv), num_heads, dim)
    rows = qkv.data_ptr(), cos.data_ptr(), sin.data_ptr()
    function(*rows, cache.address, slots.data_ptr(), q.data_ptr(), len(qkv), num_heads, torch.get_num_threads())
    return q
