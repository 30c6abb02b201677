"""Norm and rotation are those of transformers; keys and values land in their slots of one layer, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from weft_kernels.kv_write import kv_write
from weft_kernels.layer_cache import uniform_pool
from weft_kernels.rms_norm import rms_norm
from weft_kernels.rope import rope


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_bit_for_bit_that_of_transformers(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 33).to(dtype), torch.randn(33).to(dtype)
    norm = LlamaRMSNorm(33, eps=1e-5).to(dtype)
    norm.weight.data = weight
    assert torch.equal(rms_norm(x, weight, 1e-5), norm(x).detach())


def test_rotation_is_that_of_transformers() -> None:
    q, k = torch.randn(7, 4, 10), torch.randn(7, 2, 10)
    angles = torch.randn(7, 5).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    expected_q, expected_k = apply_rotary_pos_emb(q, k, cos, sin)
    both = rope(torch.cat((q, k), dim=1), cos, sin)
    assert torch.equal(both, torch.cat((expected_q, expected_k), dim=1))


def test_each_token_lands_in_its_slot_and_nothing_else_changes() -> None:
    pool = torch.zeros(5, 2, 3, 2, 4, 6)
    k, v = torch.randn(3, 2, 6), torch.randn(3, 2, 6)
    slots = torch.tensor([4 * 4 + 3, 0, 4 * 2 + 1])
    kv_write(k, v, uniform_pool(pool).layers[1], slots)
    for token, (block, offset) in enumerate([(4, 3), (0, 0), (2, 1)]):
        assert torch.equal(pool[block, :, 1, 0, offset], k[token])
        assert torch.equal(pool[block, :, 1, 1, offset], v[token])
    assert pool.count_nonzero() == k.numel() + v.numel()
