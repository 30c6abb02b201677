"""Rotary embedding turns the pairs that Hugging Face checkpoints expect."""

from __future__ import annotations

import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from weft_kernels.rope import rope


def test_rotation_is_that_of_transformers() -> None:
    q, k = torch.randn(7, 4, 10), torch.randn(7, 2, 10)
    angles = torch.randn(7, 5).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    expected_q, expected_k = apply_rotary_pos_emb(q, k, cos, sin)
    both = rope(torch.cat((q, k), dim=1), cos, sin)
    assert torch.equal(both, torch.cat((expected_q, expected_k), dim=1))
