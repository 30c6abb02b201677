"""Meaning of head transforms and KV writes, one step after another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft_kernels.kv_write.reference import kv_write_reference
from weft_kernels.rms_norm.reference import rms_norm_reference
from weft_kernels.rope.reference import rope_reference


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
    pool: Tensor,
    layer: int,
    slots: Tensor,
    rule: HeadTransform,
    temperature: Tensor | None = None,
) -> Tensor:
    """Return the queries like `rope_kv`, but leave qkv unchanged."""
    kv_heads = pool.shape[1]
    q, k, v = torch.split(qkv, [qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    if rule.norms is not None:
        q, k = (rms_norm_reference(*each, rule.eps) for each in zip((q, k), rule.norms, strict=True))
    if rule.is_rotated:
        q, k = (rope_reference(each.to(cos.dtype), cos, sin).to(qkv.dtype) for each in (q, k))
    if rule.is_normed_last:
        q, k = (rms_norm_reference(each, each.new_ones(each.shape[-1]), rule.eps) for each in (q, k))
    kv_write_reference(k, v, pool, layer, slots)
    return (q if temperature is None else (q * temperature).to(q.dtype)).contiguous()
