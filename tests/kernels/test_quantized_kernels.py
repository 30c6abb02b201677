"""Kernels that multiply FP8 and INT4 as they are stored give what the unpacked matrix would."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.kernels.device import DEVICE, close

pytest.importorskip("triton")

from weft_kernels.linear import linear, pack
from weft_kernels.moe import PackedExperts, moe, moe_reference
from weft_kernels.packed import Fp8, Int4, Stored, on_device, read_fp8, read_int4, stack
from weft_kernels.packed.linear import gemm, linear_packed

DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
NAN = 0x7F


def make_fp8(rows: int, columns: int, block: tuple[int, int]) -> Fp8:
    """All patterns but NaN, denormals among them."""
    generator = torch.Generator().manual_seed(rows * columns)
    data = torch.randint(0, 256, (rows, columns), generator=generator, dtype=torch.uint8)
    data[data & NAN == NAN] = 1
    factors = torch.rand(-(-rows // block[0]), -(-columns // block[1]), generator=generator) * 1e-2
    return read_fp8(data.view(torch.float8_e4m3fn).to(DEVICE), factors.to(DEVICE), block)


def make_int4(rows: int, columns: int, group: int, has_zeros: bool = False) -> tuple[Int4, Tensor]:
    """And what its words stand for, by the definition of compressed-tensors."""
    generator = torch.Generator().manual_seed(rows * columns)
    words = torch.randint(-(2**31), 2**31, (rows, -(-columns // 8)), generator=generator).to(torch.int32)
    factors = (torch.rand(rows, -(-columns // group), generator=generator) * 0.1).bfloat16()
    values = torch.stack([(words >> shift) & 15 for shift in range(0, 32, 4)], 2).flatten(1)[:, :columns]
    zeros = torch.randint(0, 16, factors.shape, generator=generator) if has_zeros else torch.full(factors.shape, 8)
    values = values - zeros.repeat_interleave(group, 1)[:, :columns]
    expected = values * factors.float().repeat_interleave(group, 1)[:, :columns]
    own = zeros.to(DEVICE) if has_zeros else None
    return read_int4(words.to(DEVICE), factors.to(DEVICE), columns, group, own), expected.to(DEVICE)


def int4(rows: int, columns: int, group: int, has_zeros: bool = False) -> Int4:
    return make_int4(rows, columns, group, has_zeros)[0]


MATRICES: list[Callable[[], Stored]] = [
    lambda: make_fp8(130, 300, (128, 128)),
    lambda: make_fp8(64, 256, (128, 128)),
    lambda: make_fp8(40, 41, (16, 12)),
    lambda: make_fp8(70, 512, (1, 64)),
    lambda: make_fp8(70, 512, (1, 512)),
    lambda: make_fp8(72, 300, (1, 300)),
    lambda: make_fp8(64, 256, (64, 256)),
    lambda: int4(70, 512, 32),
    lambda: int4(33, 100, 32),
    lambda: int4(20, 20, 4),
    lambda: int4(24, 96, 96),
    lambda: int4(70, 512, 32, True),
    lambda: int4(33, 100, 32, True),
    lambda: int4(24, 96, 96, True),
]


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize(("rows", "columns", "group"), [(70, 512, 32), (33, 100, 32), (1, 8, 8), (5, 20, 4)])
def test_words_of_neighbours_are_read_as_words_of_runs(
    rows: int, columns: int, group: int, has_zeros: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft_kernels.packed.quantized.CHUNK_WORDS", 100)
    found, expected = make_int4(rows, columns, group, has_zeros)
    assert found.shape == (rows, columns)
    assert torch.equal(found.unpack(), expected)


@pytest.mark.parametrize("block", [(128, 128), (16, 12)])
@pytest.mark.parametrize("columns", [300, 256, 41, 1])
def test_fp8_is_read_as_words_of_runs(columns: int, block: tuple[int, int]) -> None:
    weight = torch.randn(40, columns).to(torch.float8_e4m3fn)
    factors = torch.rand(-(-40 // block[0]), -(-columns // block[1]))
    found = read_fp8(weight, factors, block)
    assert found.shape == (40, columns)
    rows = factors.repeat_interleave(block[0], 0)[:40]
    assert torch.equal(found.unpack(), weight.float() * rows.repeat_interleave(block[1], 1)[:, :columns])


@pytest.mark.parametrize(("columns", "block"), [(256, (128, 128)), (64, (100, 12))])
def test_patterns_of_fp8_are_those_of_torch(columns: int, block: tuple[int, int]) -> None:
    """All but NaN through the kernel: a row of each, times ones; not the smallest is lost to a small factor."""
    every = torch.arange(256, dtype=torch.uint8)
    bits = every[every & NAN != NAN][:, None].expand(-1, columns).contiguous()
    patterns = bits.view(torch.float8_e4m3fn).to(DEVICE)
    factors = torch.full((-(-len(bits) // block[0]), -(-columns // block[1])), 2.0**-24, device=DEVICE)
    found = gemm(torch.ones(1, columns, device=DEVICE), read_fp8(patterns, factors, block))
    assert torch.equal(found[0], columns * 2.0**-24 * patterns[:, 0].float())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 17])
@pytest.mark.parametrize("make", MATRICES)
def test_products_are_those_of_the_unpacked_matrix(
    make: Callable[[], Stored], num_rows: int, dtype: torch.dtype
) -> None:
    weight = make()
    assert not isinstance(weight, Tensor)
    x = torch.randn(num_rows, weight.shape[1], generator=torch.Generator().manual_seed(7)).to(DEVICE, dtype)
    unpacked, bias = weight.unpack(), torch.randn(weight.shape[0], device=DEVICE).to(dtype)
    found = linear(x, pack(weight, dtype), bias)
    size = (x.float().abs() @ unpacked.abs().T).max()
    close(
        found.float() / size,
        (x.float() @ unpacked.T + bias.float()) / size,
        factor=1 if dtype is torch.float32 else 200,
    )


@pytest.mark.parametrize("make", [lambda: make_fp8(40, 256, (32, 64)), lambda: int4(40, 256, 32)])
def test_no_rows_are_no_result(make: Callable[[], Fp8 | Int4]) -> None:
    assert linear_packed(torch.randn(3, 256, device=DEVICE)[:0], make()).shape == (0, 40)


@pytest.mark.parametrize("make", [lambda: make_fp8(40, 256, (32, 64)), lambda: int4(40, 256, 32, True)])
def test_many_rows_are_multiplied_in_tiles_of_their_own(make: Callable[[], Fp8 | Int4]) -> None:
    weight = make()
    x = torch.randn(70, 256, generator=torch.Generator().manual_seed(7)).to(DEVICE)
    size = (x.abs() @ weight.unpack().abs().T).max()
    close(linear_packed(x, weight) / size, x @ weight.unpack().T / size)


@pytest.mark.parametrize("order", [None, torch.randperm(104, generator=torch.Generator().manual_seed(1))])
def test_matrices_are_put_together_row_by_row(order: Tensor | None) -> None:
    kinds: list[list[Stored]] = [
        [make_fp8(64, 40, (16, 12)), make_fp8(40, 40, (16, 12))],
        [int4(64, 40, 8, True), int4(40, 40, 8, True)],
        [make_fp8(40, 40, (16, 12)), make_fp8(64, 40, (16, 12))],
        [int4(64, 40, 8), int4(40, 40, 8)],
        [torch.randn(64, 40, device=DEVICE), make_fp8(40, 40, (16, 12))],
    ]
    for parts in kinds:
        whole = torch.cat([part if isinstance(part, Tensor) else part.unpack() for part in parts])
        found = stack(parts, order)
        unpacked = found if isinstance(found, Tensor) else found.unpack()
        assert torch.equal(unpacked, whole if order is None else whole[order.to(DEVICE)])
        assert isinstance(found, Tensor) == isinstance(parts[0], Tensor)


def test_whole_blocks_stay_whole() -> None:
    found = stack([make_fp8(256, 256, (128, 128)), make_fp8(192, 256, (128, 128))])
    assert isinstance(found, Fp8)
    assert found.block == (128, 128)
    assert found.factors.shape == (4, 2)
    swapped = torch.arange(448).view(-1, 64).flip(0).flatten()
    moved = stack([found], swapped)
    assert isinstance(moved, Fp8)
    assert moved.block == (64, 128)


def test_on_a_cpu_packed_weights_are_unpacked_to_what_they_run_in() -> None:
    weight = make_fp8(40, 41, (16, 12))
    if DEVICE == "cuda":
        assert on_device(weight, torch.bfloat16) is weight
    else:
        found = on_device(weight, torch.bfloat16, is_resident=True)
        assert isinstance(found, Tensor)
        assert torch.equal(found, weight.unpack().bfloat16())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_on_input", [False, True])
@pytest.mark.parametrize("form", ["fp8", "int4", "int4-zeros"])
def test_experts_are_those_of_the_unpacked_matrices(form: str, is_on_input: bool, dtype: torch.dtype) -> None:
    """In tiles that lie within the groups, and, of fewer rows and columns, in others."""
    hidden, size = (256, 16) if is_on_input else (40, 24)
    gate_up: Fp8 | Int4
    down: Fp8 | Int4
    if form == "fp8":
        block = (32, 128) if is_on_input else (16, 12)
        gate_up, down = make_fp8(3 * 2 * size, hidden, block), make_fp8(3 * hidden, size, block)
    else:
        group = 32 if is_on_input else 4
        has_zeros = form == "int4-zeros"
        gate_up = int4(3 * 2 * size, hidden, group, has_zeros)
        down = int4(3 * hidden, size, min(group, 8), has_zeros)
    generator = torch.Generator().manual_seed(3)
    x = (torch.randn(5, hidden, generator=generator) * 0.1).to(DEVICE, dtype)
    weights, chosen = torch.rand(5, 3, generator=generator).to(DEVICE).topk(2, dim=-1)
    found = moe(x, chosen, weights, PackedExperts((), (), (gate_up, down)), is_on_input).float()
    plain = gate_up.unpack().view(3, 2 * size, hidden), down.unpack().view(3, hidden, size)
    expected = moe_reference(x.float(), chosen, weights, *plain, is_on_input)
    scale = expected.abs().max()
    close(found / scale, expected / scale, factor=3 if dtype is torch.float32 else 2000)
