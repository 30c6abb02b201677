"""What rotating and writing means, pair by pair."""

from __future__ import annotations

import torch
from torch import Tensor

from weft_kernels.kv_write.reference import kv_write_reference


def rope_kv_reference(
    qkv: Tensor, cos: Tensor, sin: Tensor, pool: Tensor, layer: int, slots: Tensor, is_interleaved: bool
) -> Tensor:
    """See `weft_kernels.rope_kv.rope_kv`."""
    kv_heads, half = pool.shape[1], qkv.shape[2] // 2
    num_rotated = qkv.shape[1] - kv_heads
    cos, sin = cos[:, None, :half], sin[:, None, :half]
    x = qkv[:, :num_rotated]
    first, second = (x[..., 0::2], x[..., 1::2]) if is_interleaved else (x[..., :half], x[..., half:])
    pair = first * cos - second * sin, second * cos + first * sin
    rotated = torch.stack(pair, -1).flatten(-2) if is_interleaved else torch.cat(pair, -1)
    kv_write_reference(rotated[:, num_rotated - kv_heads :], qkv[:, num_rotated:], pool, layer, slots)
    return rotated[:, : num_rotated - kv_heads].contiguous()
