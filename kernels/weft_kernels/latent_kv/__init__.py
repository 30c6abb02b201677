"""Prepares the vectors of latent attention, writes them into the pool, and rotates the queries."""

from __future__ import annotations

import torch
from torch import Tensor

from weft_kernels.kv_write import kv_write, kv_write_reference
from weft_kernels.layer_cache import LayerCache
from weft_kernels.rms_norm import rms_norm, rms_norm_reference
from weft_kernels.rope import rope, rope_reference


def latent_kv(
    down: Tensor,
    q: Tensor,
    norm: Tensor,
    eps: float,
    angles: tuple[Tensor, Tensor],
    cache: LayerCache,
    slots: Tensor,
) -> Tensor:
    """Write each row's normed latent and rotated key part into the pool, in this order; return rotated queries.

    down: [T, kv_rank + rope_dim], contiguous; the first part is normed by norm [kv_rank]. q: [T, heads, rope_dim],
    the part of the queries to rotate, perhaps within wider heads. angles: cosine and sine [T, rope_dim], both halves
    alike. cache: one head of kv_rank + rope_dim numbers, written at slots [T] int64.
    Returns [T, heads, rope_dim], contiguous. (DeepSeek-V2, arXiv 2405.04434, section 2.1.)
    """
    if down.is_cuda:
        from weft_kernels.latent_kv.kernel import latent_kv_kernel

        return latent_kv_kernel(down, q, norm, eps, angles, cache, slots)
    kv_rank = len(norm)
    rotated = rope(down[:, None, kv_rank:], *angles)
    cached = torch.cat((rms_norm(down[:, None, :kv_rank], norm, eps), rotated), dim=-1)
    kv_write(cached, None, cache, slots)
    return rope(q, *angles)


def latent_kv_reference(
    down: Tensor,
    q: Tensor,
    norm: Tensor,
    eps: float,
    angles: tuple[Tensor, Tensor],
    cache: LayerCache,
    slots: Tensor,
) -> Tensor:
    compressed = rms_norm_reference(down[:, None, : len(norm)], norm, eps)
    cached = torch.cat((compressed, rope_reference(down[:, None, len(norm) :], *angles)), dim=-1)
    kv_write_reference(cached, None, cache, slots)
    return rope_reference(q, *angles)
