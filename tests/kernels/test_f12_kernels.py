"""Kernels that multiply F12 words give what the unpacked matrix would; those that unpack them give its very bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.kernels.device import DEVICE, close

pytest.importorskip("triton")

from weft_kernels.linear import linear, linear_reference, pack
from weft_kernels.moe import PackedExperts, moe, moe_reference
from weft_kernels.packed import embedding_rows, pack_f12
from weft_kernels.packed import linear as packed_linear
from weft_kernels.packed.f12_unpack import unpack_rows
from weft_kernels.packed.linear import gemm, linear_packed

# the interpreter multiplies float32, see house style; bfloat16 is multiplied where a GPU is
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
SHAPES = [(1, 8), (33, 100), (70, 256), (16, 1100)]


def make_weight(rows: int, columns: int, escapes: int, large: float = 300.0) -> Tensor:
    """Ordinary weights, zeros, and some that have no code: too large, tiny, denormal."""
    generator = torch.Generator().manual_seed(rows + columns)
    weight = torch.randn(rows, columns, generator=generator) * 0.02
    weight[0, columns // 2 :] = 0
    places = torch.randint(0, rows * columns, (escapes,), generator=generator)
    weight.view(-1)[places] = torch.tensor([large, 1e-12, -1e-39, -2 * large])[torch.arange(escapes) % 4]
    return weight.bfloat16().to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 2, 17])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_products_are_those_of_the_unpacked_matrix(rows: int, columns: int, num_rows: int, dtype: torch.dtype) -> None:
    weight = make_weight(rows, columns, escapes=rows * columns // 100)
    x = torch.randn(num_rows, columns, generator=torch.Generator().manual_seed(2)).to(DEVICE, dtype)
    found = linear(x, pack(pack_f12(weight), dtype))
    expected = linear_reference(x.double(), weight.double()) if dtype is torch.float32 else x.float() @ weight.float().T
    size = (x.float().abs() @ weight.float().abs().T).max()
    close(found / size, (expected / size).to(dtype))


@pytest.mark.parametrize("splits", [1, 2, 3])
def test_a_long_row_is_added_up_in_parts_and_twice_the_same(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = make_weight(70, 3000, escapes=200), torch.randn(19, 3000, device=DEVICE)
    packed, bias = pack_f12(weight), torch.randn(70, device=DEVICE)
    asked: list[int] = []
    arrived = packed_linear._arrived

    def counted(device: torch.device, num_tiles: int) -> Tensor:
        asked.append(num_tiles)
        return arrived(device, num_tiles)

    monkeypatch.setattr(packed_linear, "_arrived", counted)
    tiles = {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 256, "num_warps": 4, "num_stages": 2, "programs": 4 * splits}
    found = [gemm(x, packed, bias, dict(tiles)) for _ in range(2)]
    assert asked == ([4, 4] if splits > 1 else [])
    assert not arrived(x.device, 4).any()
    close(found[0], functional.linear(x, weight.float(), bias), factor=30)
    assert torch.equal(*found)


@pytest.mark.parametrize(("rows", "columns", "num_rows"), [(33, 100, 20), (130, 1100, 5)])
@pytest.mark.parametrize(("block_m", "block_n", "block_k"), [(8, 32, 256), (16, 64, 128), (64, 128, 128)])
def test_products_are_the_same_in_all_tiles(
    block_m: int, block_n: int, block_k: int, rows: int, columns: int, num_rows: int
) -> None:
    """Half a block of columns at a time, and a short last one; tiles of more and of fewer rows than share a base."""
    weight, x = make_weight(rows, columns, escapes=rows * columns // 50), torch.randn(num_rows, columns, device=DEVICE)
    tiles = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "num_warps": 4, "num_stages": 1}
    size = (x.abs() @ weight.float().abs().T).max()
    close(gemm(x, pack_f12(weight), None, tiles) / size, x @ weight.float().T / size)


def test_biases_and_leading_dimensions_are_as_in_any_linear_layer() -> None:
    weight, bias = make_weight(33, 100, escapes=9), torch.randn(33, device=DEVICE)
    x = torch.randn(2, 3, 100, device=DEVICE)
    close(linear_packed(x, pack_f12(weight), bias), functional.linear(x, weight.float(), bias), factor=30)
    close(linear_packed(x[:1, :1], pack_f12(weight), bias), functional.linear(x[:1, :1], weight.float(), bias), 30)


def test_no_rows_are_no_result() -> None:
    weight, x = (
        pack(pack_f12(make_weight(33, 100, escapes=9)), torch.float16),
        torch.randn(2, 3, 100, device=DEVICE).half(),
    )
    for empty in (x[:0], x[:, :0], x[0, :0]):
        found = linear(empty, weight, torch.randn(33, device=DEVICE))
        assert (found.shape, found.dtype) == ((*empty.shape[:-1], 33), torch.float16)


def test_many_rows_are_multiplied_in_tiles_of_their_own() -> None:
    weight, x = make_weight(33, 256, escapes=20, large=5.0), torch.randn(70, 256, device=DEVICE)
    close(linear_packed(x, pack_f12(weight)), x @ weight.float().T, factor=10)


@pytest.mark.parametrize("size", [1e-15, 1e15])
def test_rows_far_from_one_keep_their_precision(size: float) -> None:
    weight, x = make_weight(33, 104, escapes=0), torch.randn(2, 104, device=DEVICE) * size
    close(linear_packed(x, pack_f12(weight)) / size, (x / size) @ weight.float().T)


def test_a_weight_that_is_no_number_spoils_its_own_output_alone() -> None:
    weight = make_weight(66, 64, escapes=0)
    weight[65, 3] = float("nan")
    for num_rows in (1, 4):
        found = linear_packed(torch.ones(num_rows, 64, device=DEVICE), pack_f12(weight))
        assert found[:, 65].isnan().all()
        assert found[:, :65].isfinite().all()


@pytest.mark.parametrize(("rows", "columns"), [(1, 8), (33, 100), (66, 72), (2, 4200)])
def test_unpacked_rows_are_the_bits_that_were_packed(rows: int, columns: int) -> None:
    weight = make_weight(rows, columns, escapes=rows * columns // 200)
    weight[rows // 2, columns // 3] = float("nan")
    packed = pack_f12(weight)
    assert torch.equal(unpack_rows(packed).view(torch.int16), weight.view(torch.int16))
    ids = torch.tensor([rows - 1, 0, rows // 2, rows - 1], device=DEVICE)
    assert torch.equal(embedding_rows(packed, ids).view(torch.int16), weight[ids].view(torch.int16))
    assert embedding_rows(packed, ids[:0]).shape == (0, columns)


def test_long_prompts_are_torchs_own_product_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_linear, "MAX_FUSED_ROWS", 4)
    weight, x = make_weight(33, 104, escapes=20), torch.randn(5, 104, device=DEVICE)
    assert torch.equal(linear_packed(x, pack_f12(weight)), functional.linear(x, weight.float()))


@pytest.mark.gpu
@pytest.mark.usefixtures("own_tables")
def test_long_prompts_in_bfloat16_are_cublas_bit_for_bit() -> None:
    weight = make_weight(1024, 2048, escapes=300)
    x = torch.randn(packed_linear.MAX_FUSED_ROWS + 1, 2048, device=DEVICE).bfloat16()
    assert torch.equal(linear_packed(x, pack_f12(weight)), functional.linear(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_rows", "num_experts", "top_k", "hidden", "size", "is_on_input"),
    [(1, 3, 2, 40, 24, True), (5, 3, 2, 33, 70, False)],
)
def test_experts_are_those_of_the_unpacked_matrices(
    num_rows: int, num_experts: int, top_k: int, hidden: int, size: int, is_on_input: bool, dtype: torch.dtype
) -> None:
    """Neither 70 nor 2 x 24 rows are whole blocks: a tile's rows have two bases and two lists of escapes."""
    gate_up = make_weight(num_experts * 2 * size, hidden, escapes=40, large=5.0)
    down = make_weight(num_experts * hidden, size, escapes=20, large=5.0)
    packed = pack_f12(gate_up), pack_f12(down)
    assert all((each.values.abs() >= 5).any() for each in packed)
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, hidden, generator=generator).to(DEVICE, dtype)
    weights, chosen = torch.rand(num_rows, num_experts, generator=generator).to(DEVICE).topk(top_k, dim=-1)
    experts = PackedExperts((), (), packed)
    found = moe(x, chosen, weights, experts, is_on_input)
    plain = gate_up.float().view(num_experts, 2 * size, hidden), down.float().view(num_experts, hidden, size)
    expected = moe_reference(x, chosen, weights, *plain, is_on_input)
    scale = expected.float().abs().max()
    close(found / scale, expected / scale, factor=3)
