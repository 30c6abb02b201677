"""Weights in 12 bits on a CPU: every bit comes back, and products are those of the plain panels to the last bit."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.device import ISAS
from weft_kernels.linear import linear, pack
from weft_kernels.linear.packed12 import Packed12, pack_12
from weft_kernels.native import CHOICE, load

pytestmark = pytest.mark.skipif(not ISAS, reason="no build for this processor")
DTYPES = [torch.float32, torch.bfloat16]
SETS = [name for name in ISAS if name != "amx"]


@pytest.fixture(params=SETS)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """Of every instruction set that this machine has; Intel's matrix unit has none of it in bfloat16."""
    monkeypatch.setenv(CHOICE, request.param)
    found = load(request.param)
    assert found is not None
    return found


def bits(values: Tensor) -> Tensor:
    """So that NaN are compared as well."""
    return values.contiguous().view(torch.int16 if values.dtype == torch.bfloat16 else torch.int32)


def like_a_model(outputs: int, inputs: int, num_strange: int = 0) -> Tensor:
    """Gaussian weights, some replaced by what no gaussian has: signed zeros, infinities, NaN payloads, denormals."""
    weight = (0.02 * torch.randn(outputs, inputs)).bfloat16()
    strange = torch.tensor([0, -0x8000, 0x7F80, -0x80, 0x7FC1, -0x3, 1, 0x7F7F, 0x0080], dtype=torch.int16)
    places = torch.randperm(weight.numel())[:num_strange]
    weight.view(-1)[places] = strange[torch.arange(num_strange) % len(strange)].view(torch.bfloat16)
    return weight


def both(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Packed12]:
    plain, packed = (pack(weight, dtype, is_resident).data for is_resident in (False, True))
    assert isinstance(plain, Tensor)
    assert isinstance(packed, Packed12)
    return plain, packed


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs", [1, 31, 32, 33, 200])
def test_every_bit_comes_back(library: ctypes.CDLL, outputs: int, dtype: torch.dtype) -> None:
    for inputs in (4, 256, 260, 512, 1032):
        plain, packed = both(like_a_model(outputs, inputs, outputs * inputs // 150), dtype)
        assert torch.equal(bits(packed.unpack()), bits(plain))
        assert packed.nbytes < 0.8 * plain.nbytes or plain.nbytes < 10_000


def test_all_patterns_of_bfloat16_come_back_where_they_are_rare(library: ctypes.CDLL) -> None:
    weight = like_a_model(4096, 2048)
    weight.view(-1)[torch.randperm(weight.numel())[:65536]] = torch.arange(65536).to(torch.int16).view(torch.bfloat16)
    plain, packed = both(weight, torch.bfloat16)
    assert torch.equal(bits(packed.unpack()), bits(plain))


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_those_of_plain_panels(library: ctypes.CDLL, dtype: torch.dtype) -> None:
    for outputs, inputs in ((75, 36), (64, 1032), (130, 300), (33, 2052)):
        weight = like_a_model(outputs, inputs)
        # listed are some neighbours, one of the first unit and one of the last, and of most slices none
        weight[0, :24] = 2.0 ** torch.arange(-120, 120, 10)
        weight[-1, -1] = -1e-30
        plain, packed = pack(weight, dtype), pack(weight, dtype, is_resident=True)
        assert isinstance(packed.data, Packed12)
        assert len(packed.data.values) >= 5
        bias = torch.randn(outputs).to(dtype)
        for num_rows in (*range(1, 14), 24, 25, 37, 60, 251, 517):
            x = torch.randn(num_rows, inputs).to(dtype)
            assert torch.equal(bits(linear(x, packed, bias)), bits(linear(x, plain, bias)))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 60),
    inputs=st.integers(1, 300),
    outputs=st.integers(1, 90),
    share=st.floats(0, 0.01),
    seed=st.integers(0, 99),
)
@pytest.mark.parametrize("name", SETS)
def test_whatever_the_shape_and_the_weights(
    name: str, rows: int, inputs: int, outputs: int, share: float, seed: int
) -> None:
    torch.manual_seed(seed)
    weight = like_a_model(outputs, inputs, int(share * outputs * inputs))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CHOICE, name)
        for dtype in DTYPES:
            plain, packed = pack(weight, dtype), pack(weight, dtype, is_resident=True)
            x = torch.randn(rows, inputs).to(dtype)
            # of several NaN in a sum either may be what is left: compilers order a product's operands as they like
            found, expected = (torch.where(out.isnan(), 0, out) for out in (linear(x, packed), linear(x, plain)))
            assert torch.equal(bits(found), bits(expected))
            assert torch.equal(linear(x, packed).isnan(), linear(x, plain).isnan())


def test_threads_change_nothing(library: ctypes.CDLL) -> None:
    before, found = torch.get_num_threads(), []
    weight, x = like_a_model(300, 512, 900), torch.randn(5, 512).bfloat16()
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            packed = pack(weight, torch.bfloat16, is_resident=True)
            assert isinstance(packed.data, Packed12)
            found.append((linear(x, packed), packed.data.units, packed.data.values))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        for mine, its in zip(found[0], other, strict=True):
            assert torch.equal(mine.view(torch.uint8), its.view(torch.uint8))


def test_weights_with_too_many_exponents_stay_plain(library: ctypes.CDLL) -> None:
    any_bits = torch.randint(-(1 << 15), 1 << 15, (64, 256), dtype=torch.int16).view(torch.bfloat16)
    assert isinstance(pack(any_bits, torch.bfloat16, is_resident=True).data, Tensor)
    assert isinstance(pack(torch.randn(64, 256), torch.float32, is_resident=True).data, Tensor)


def test_panels_that_do_not_fill_whole_units_stay_plain(library: ctypes.CDLL) -> None:
    assert pack_12(library, torch.randn(3, 1, 32).bfloat16()) is None
