"""Angles of rotary position embeddings for the kinds of scaling that a config may ask for."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from weft.model.config import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """[head_dim / 2] float32: radians per position of each pair."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _stretch_long_waves(frequencies, rope)
    return frequencies


def cos_sin(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[T, head_dim] each, both halves alike. The angles are fp32 whatever `dtype` is."""
    angles = positions[:, None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _stretch_long_waves(frequencies: Tensor, rope: Rope) -> Tensor:
    """llama3: waves beyond the trained context turn `factor` times slower, short ones as before; between, a blend."""
    context = rope.original_max_positions
    waves = 2 * math.pi / frequencies
    slowed = frequencies / rope.factor
    share = (context / waves - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - share) * slowed + share * frequencies
    long = waves > context / rope.low_freq_factor
    short = waves < context / rope.high_freq_factor
    return torch.where(long, slowed, torch.where(short, frequencies, blended))
