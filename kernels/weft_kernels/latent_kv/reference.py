"""Meaning of preparing and writing latent vectors."""

from __future__ import annotations

import torch
from torch import Tensor

from weft_kernels.kv_write.reference import kv_write_reference
from weft_kernels.rms_norm.reference import rms_norm_reference
from weft_kernels.rope.reference import rope_reference


def latent_kv_reference(
    down: Tensor,
    q: Tensor,
    norm: Tensor,
    eps: float,
    angles: tuple[Tensor, Tensor],
    pool: Tensor,
    layer: int,
    slots: Tensor,
) -> Tensor:
    compressed = rms_norm_reference(down[:, None, : len(norm)], norm, eps)
    cached = torch.cat((compressed, rope_reference(down[:, None, len(norm) :], *angles)), dim=-1)
    kv_write_reference(cached, None, pool, layer, slots)
    return rope_reference(q, *angles)
