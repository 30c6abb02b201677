"""Norm, gate and block copies against their references."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.device import DEVICE, close

pytest.importorskip("triton")

from weft_kernels.block_copy import gather_blocks, scatter_blocks
from weft_kernels.block_copy.kernel import gather_blocks_kernel, scatter_blocks_kernel
from weft_kernels.rms_norm import add_rms_norm, rms_norm
from weft_kernels.rms_norm.kernel import add_rms_norm_kernel, rms_norm_kernel
from weft_kernels.silu_mul import silu_mul
from weft_kernels.silu_mul.kernel import silu_mul_kernel

# No tl.dot here: values are fp32 between load and store, so that bfloat16 is right but for the last rounding.
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (3, 5, 33), (2, 1000), (0, 8)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = torch.randn(shape).to(DEVICE, dtype), torch.randn(shape[-1]).to(DEVICE, dtype)
    close(rms_norm_kernel(x, weight, 1e-5).cpu(), rms_norm(x.cpu(), weight.cpu(), 1e-5))


def test_rms_norm_of_heads_that_lie_apart() -> None:
    x, weight = torch.randn(4, 6, 16, device=DEVICE)[:, 1:4], torch.randn(16, device=DEVICE)
    close(rms_norm_kernel(x, weight, 1e-6).cpu(), rms_norm(x.cpu(), weight.cpu(), 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (5, 33), (0, 8)])
def test_add_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, *shape).to(DEVICE, dtype)
    weight = torch.randn(shape[-1]).to(DEVICE, dtype)
    total, normed = add_rms_norm_kernel(x, residual, weight, 1e-5)
    expected_total, expected = add_rms_norm(x.cpu(), residual.cpu(), weight.cpu(), 1e-5)
    close(total.cpu(), expected_total)
    close(normed.cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (3, 2 * 1025), (2, 3, 14), (0, 8)])
def test_silu_mul(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = (torch.randn(shape) * 4).to(DEVICE, dtype)
    close(silu_mul_kernel(x).cpu(), silu_mul(x.cpu()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("shape", [(9, 2, 3, 2, 4, 8), (9, 2, 1, 2, 3, 5), (9, 4, 2, 2, 16, 24)])
def test_blocks_come_and_go(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    pool = torch.randint(0, 255, shape).to(DEVICE, dtype)
    blocks = torch.tensor([7, 0, 3], device=DEVICE)
    for part in (pool, pool[:, 1:]):
        buffer = gather_blocks_kernel(part, blocks)
        assert torch.equal(buffer.cpu(), gather_blocks(part.cpu(), blocks.cpu()))
        expected, target = part.cpu().clone(), torch.zeros_like(pool)[:, -part.shape[1] :]
        expected[[1, 2, 4, 5, 6, 8]] = 0
        scatter_blocks_kernel(buffer, target, blocks)
        assert torch.equal(target.cpu(), expected)
        again = torch.zeros_like(part.cpu())
        scatter_blocks(buffer.cpu(), again, blocks.cpu())
        assert torch.equal(again, expected)


def test_no_blocks_are_no_launch() -> None:
    pool, none = torch.ones(3, 2, 4, device=DEVICE), torch.tensor([], dtype=torch.int64, device=DEVICE)
    assert gather_blocks_kernel(pool, none).shape == (0, 2, 4)
    scatter_blocks_kernel(pool[:0], pool, none)
    assert bool((pool == 1).all())
