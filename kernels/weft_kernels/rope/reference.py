"""Meaning of rotary embedding, in the rotate-half convention of Hugging Face checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor


def rope_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-high, low), dim=-1) * sin[:, None]
