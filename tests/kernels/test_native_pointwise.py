"""Norm, rotation, gate and KV write in C++ give what their references define, for rows of any stride."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from weft_kernels.kv_write import kv_write, kv_write_reference
from weft_kernels.layer_cache import uniform_pool
from weft_kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_reference
from weft_kernels.rope import rope, rope_reference
from weft_kernels.rope_kv import ROTATED, rope_kv, rope_kv_reference
from weft_kernels.silu_mul import gelu_mul, silu_mul, silu_mul_reference

pytestmark = pytest.mark.usefixtures("isa")


@pytest.mark.parametrize("size", [16, 48, 1024, 33])
@pytest.mark.parametrize("num_rows", [0, 1, 5, 70])
def test_norms(num_rows: int, size: int) -> None:
    wide, weight = torch.randn(num_rows, size + 7), torch.randn(size)
    for x in (wide[:, :size], wide[:, 3 : size + 3], wide[:, :size].contiguous()):
        torch.testing.assert_close(rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("size", [16, 48, 1024, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_sums(dtype: torch.dtype, size: int) -> None:
    x, residual, weight = (torch.randn(*shape).to(dtype) for shape in ((5, size), (5, size), (size,)))
    total, normed = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, residual + x)
    if dtype == torch.bfloat16:
        assert _as_rounded_twice(normed, total, weight)
    else:
        torch.testing.assert_close(normed, rms_norm_reference(total, weight, 1e-5), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("size", [16, 1024])
def test_norms_of_bfloat16_are_rounded_before_the_weight(size: int) -> None:
    """As in the reference: but for sums of another order, which seldom move a number to the next one."""
    x, weight = torch.randn(70, size + 7).bfloat16(), torch.randn(size).bfloat16()
    for rows in (x[:, :size], x[:, :size].contiguous()):
        out, expected = rms_norm(rows, weight, 1e-5), rms_norm_reference(rows, weight, 1e-5)
        assert (out != expected).float().mean() < 0.002
        assert _as_rounded_twice(out, rows, weight)


def _as_rounded_twice(out: Tensor, rows: Tensor, weight: Tensor) -> bool:
    """Every output is a product of the reference's normed number, or of one beside it, rounded once more."""
    normed = rms_norm_reference(rows, torch.ones_like(weight), 1e-5)
    beside = (torch.nextafter(normed, torch.full_like(normed, end)) for end in (-torch.inf, torch.inf))
    return bool(torch.stack([weight * near == out for near in (normed, *beside)]).any(0).all())


def test_gates_of_bfloat16_are_rounded_before_the_product() -> None:
    x = torch.cat((torch.randn(50, 5632), torch.linspace(-120, 120, 5632)[None])).bfloat16()
    out, expected = silu_mul(x), silu_mul_reference(x)
    assert (out != expected)[:50].float().mean() < 0.002
    torch.testing.assert_close(out, expected, rtol=2**-6, atol=1e-30)
    gate, up = x.chunk(2, dim=-1)
    out, expected = gelu_mul(x), functional.gelu(gate.double(), approximate="tanh").bfloat16() * up
    assert (out != expected)[:50].float().mean() < 0.002
    torch.testing.assert_close(out, expected, rtol=2**-6, atol=1e-10)


@pytest.mark.parametrize("dim", [32, 64, 128])
def test_rotations_of_bfloat16_are_the_references_bit_for_bit(dim: int) -> None:
    x, cos, sin = (torch.randn(*shape).bfloat16() for shape in ((9, 8, dim), (9, dim), (9, dim)))
    for heads in (x, x[:, 2:]):
        assert torch.equal(rope(heads, cos, sin), rope_reference(heads, cos, sin))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(0, 4, 64), (1, 4, 32), (9, 6, 128), (300, 2, 64), (5, 4, 24)])
def test_rotated_rows_lie_in_the_pool(dtype: torch.dtype, size: tuple[int, int, int]) -> None:
    """What rotation and writing are, one after the other; and no other place of the pool is touched."""
    num_rows, num_heads, dim = size
    qkv = torch.randn(num_rows, num_heads + 2 * 2, dim).to(dtype)
    cos, sin = (torch.randn(num_rows, dim // 2).to(dtype).repeat(1, 2) for _ in range(2))
    pool = torch.randn(80, 2, 3, 2, 4, dim).to(dtype)
    slots = torch.randperm(80 * 4)[:num_rows]
    expected_pool = pool.clone()
    expected = rope_kv_reference(qkv, cos, sin, uniform_pool(expected_pool).layers[1], slots, ROTATED)
    q = rope_kv(qkv, cos, sin, uniform_pool(pool).layers[1], slots)
    close = {"rtol": 0, "atol": 0} if dtype == torch.bfloat16 else {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(q, expected, **close)
    torch.testing.assert_close(pool, expected_pool, **close)


@pytest.mark.parametrize("size", [16, 2816, 5])
def test_gates(size: int) -> None:
    x = torch.cat((torch.randn(7, 2 * size), torch.linspace(-120, 120, 2 * size)[None]))
    torch.testing.assert_close(silu_mul(x), silu_mul_reference(x), rtol=2e-6, atol=1e-30)
    gate, up = x.double().chunk(2, dim=-1)
    exact = functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(gelu_mul(x).double(), exact, rtol=4e-6, atol=1e-12)


def test_a_gate_of_no_number_is_none() -> None:
    x = torch.tensor([[float("nan"), float("inf"), *([0.0] * 14), *([1.0] * 16)]])
    out = silu_mul(x)[0]
    assert out[0].isnan()
    assert out[1].isposinf()
    assert (out[2:] == 0).all()


@pytest.mark.parametrize("dim", [32, 64, 128, 10])
def test_rotations_of_heads_within_wider_rows(dim: int) -> None:
    heads = torch.randn(9, 8, dim)
    cos, sin = torch.randn(9, dim), torch.randn(9, dim)
    for x in (heads, heads[:, :6], heads[:, 2:]):
        torch.testing.assert_close(rope(x, cos, sin), rope_reference(x, cos, sin), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parts", [1, 2])
def test_keys_and_values_land_where_the_reference_puts_them(parts: int, dtype: torch.dtype) -> None:
    heads = torch.randn(11, 9, 24).to(dtype)
    slots = torch.randperm(6 * 4)[:11]
    pools = [torch.zeros(6, 3, 2, parts, 4, 24, dtype=dtype) for _ in range(2)]
    for layer in range(2):
        new = heads[:, :3], heads[:, 5:8] if parts == 2 else None
        kv_write(*new, uniform_pool(pools[0]).layers[layer], slots)
        kv_write_reference(*new, uniform_pool(pools[1]).layers[layer], slots)
    assert torch.equal(*pools)
    assert pools[0].any()
