"""Activations are torch's functions, and give the same bits at every place of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from weft_kernels.activations import gelu, gelu_tanh, sigmoid, silu, softplus

TANH = partial(functional.gelu, approximate="tanh")
ALL = [
    (sigmoid, torch.sigmoid),
    (silu, functional.silu),
    (softplus, functional.softplus),
    (gelu, functional.gelu),
    (gelu_tanh, TANH),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("found", "expected"), ALL)
def test_activation_equals_torch_function(
    found: Callable[[Tensor], Tensor], expected: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    x = torch.cat([torch.linspace(-30, 30, 4001), torch.tensor([-1e4, -90.0, 0.0, 90.0, 1e4])]).to(dtype)
    rtol, atol = (1e-6, 1e-6) if dtype == torch.float32 else (2**-7, 1e-6)
    torch.testing.assert_close(found(x), expected(x), rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", [each for each, _ in ALL])
def test_activation_of_a_row_equals_that_of_one_row(activation: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    x = (4 * torch.randn(300, 21, generator=torch.Generator().manual_seed(5))).to(dtype)
    for some in (x, torch.cat((x, x), 1)[:, :21]):
        assert torch.equal(activation(some), torch.cat([activation(row[None].clone()) for row in x]))
