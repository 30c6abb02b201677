"""RMSNorm rounds where transformers rounds."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from weft_kernels.rms_norm import rms_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_bit_for_bit_that_of_transformers(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 33).to(dtype), torch.randn(33).to(dtype)
    norm = LlamaRMSNorm(33, eps=1e-5).to(dtype)
    norm.weight.data = weight
    assert torch.equal(rms_norm(x, weight, 1e-5), norm(x).detach())
