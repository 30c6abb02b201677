"""A linear layer is the product of the widened weights, whichever way computes it."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.device import ISAS
from weft_kernels.linear import linear, linear_reference, pack
from weft_kernels.native import CHOICE, load, processor
from weft_kernels.native.processor import most_isa

DTYPES = [torch.float32, torch.bfloat16]
COLUMNS = (1, 7, 31, 33, 257)


@pytest.fixture(params=[*ISAS, "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every way of computing that this machine has."""
    monkeypatch.setenv(CHOICE, request.param)
    return str(request.param)


def close(out: Tensor, x: Tensor, weight: Tensor, tolerance: float = 1e-6) -> None:
    """Within `tolerance` of the exact product, relative to the longest row and column."""
    exact = x.double() @ weight.double().T
    scale = x.double().norm(dim=-1).max() * weight.double().norm(dim=-1).max()
    assert out.shape == exact.shape
    assert ((out - exact).abs().max() <= tolerance * scale).item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", COLUMNS)
def test_odd_shapes_come_out_as_the_exact_product_of_the_widened_weights(
    way: str, columns: int, dtype: torch.dtype
) -> None:
    for num_outputs in COLUMNS:
        weight = torch.randn(num_outputs, columns).to(dtype)
        packed = pack(weight, torch.float32)
        for num_rows in (*range(1, 27), 64, 65, 130):
            x = torch.randn(num_rows, columns)
            close(linear(x, packed), x, weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_and_inputs_that_are_taken_in_several_turns(way: str, dtype: torch.dtype) -> None:
    """More rows than caches hold, more inputs than one slice has, and outputs that end within a panel."""
    for num_rows, columns in ((97, 1030), (251, 300), (517, 520)):
        weight, x = torch.randn(75, columns).to(dtype), torch.randn(num_rows, columns)
        packed = pack(weight, torch.float32)
        out = linear(x, packed)
        close(out, x, weight)
        if way != "torch":  # sums run over the inputs in one order, whatever rows stand beside
            assert torch.equal(out[40:43], linear(x[40:43], packed))


@pytest.mark.parametrize("is_resident", [False, True])
@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.float32, torch.bfloat16), (torch.bfloat16,) * 2])
@pytest.mark.parametrize("isa", ISAS)
def test_row_equals_product_of_one_row(
    isa: str, dtypes: tuple[torch.dtype, torch.dtype], is_resident: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 1 to 256 rows: some counts are packed, tiled, unpacked and widened in other ways than one row."""
    monkeypatch.setenv(CHOICE, isa)
    torch.manual_seed(2)
    weight, x = pack(torch.randn(75, 523).to(dtypes[1]), dtypes[0], is_resident), torch.randn(256, 523).to(dtypes[0])
    alone = torch.cat([linear(row[None], weight) for row in x])
    for num_rows in (*range(2, 17), 25, 64, 130, 256):
        assert torch.equal(linear(x[:num_rows], weight), alone[:num_rows])


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 130), inputs=st.integers(1, 700), outputs=st.integers(1, 90), seed=st.integers(0, 99))
@pytest.mark.parametrize("name", ISAS)
def test_the_extension_agrees_with_torch(name: str, rows: int, inputs: int, outputs: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=generator)
    weight = torch.randn(outputs, inputs, generator=generator).bfloat16()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CHOICE, name)
        out = linear(x, pack(weight, torch.float32))
    close(out, x, weight)
    scale = x.norm(dim=-1).max() * weight.float().norm(dim=-1).max()
    assert ((out - linear_reference(x, weight.float())).abs().max() <= 1e-6 * scale).item()


def near(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """The fp32 sums of the exact products, rounded once to bfloat16."""
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    scale = x.double().norm(dim=-1).max() * weight.double().norm(dim=-1).max()
    assert out.dtype == torch.bfloat16
    assert out.shape == exact.shape
    assert ((out - exact).abs() <= 2**-8 * exact.abs() + 1e-6 * scale).all()


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("has_bias", [False, True])
def test_bfloat16_activations_are_rounded_once_at_the_end(has_bias: bool) -> None:
    for num_rows, inputs, outputs in (
        (1, 96, 40),
        (5, 1, 33),
        (13, 7, 64),
        (26, 513, 75),
        (130, 1030, 33),
        (251, 300, 7),
    ):
        x, weight = torch.randn(num_rows, inputs).bfloat16(), torch.randn(outputs, inputs).bfloat16()
        bias = torch.randn(outputs).bfloat16() if has_bias else None
        near(linear(x, pack(weight, torch.bfloat16), bias), x, weight, bias)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 130), inputs=st.integers(1, 1100), outputs=st.integers(1, 90), seed=st.integers(0, 99))
@pytest.mark.parametrize("name", ISAS)
def test_products_of_bfloat16_agree_with_torch_in_fp32(
    name: str, rows: int, inputs: int, outputs: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=generator).bfloat16()
    weight = torch.randn(outputs, inputs, generator=generator).bfloat16()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CHOICE, name)
        out = linear(x, pack(weight, torch.bfloat16))
    near(out, x, weight)
    scale = x.float().norm(dim=-1).max() * weight.float().norm(dim=-1).max()
    expected = linear_reference(x.float(), weight)
    assert ((out - expected).abs() <= 2**-8 * expected.abs() + 1e-6 * scale).all()


@pytest.mark.skipif(len(ISAS) < 3, reason="no AVX-512 with bfloat16 here")
def test_floats_come_out_the_same_bit_for_bit_where_the_processor_multiplies_bfloat16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for dtype in DTYPES:
        for num_rows, inputs, outputs in ((1, 600, 100), (9, 301, 33), (77, 1030, 75)):
            x, weight, outs = torch.randn(num_rows, inputs), torch.randn(outputs, inputs).to(dtype), []
            for name in ISAS[1:]:
                monkeypatch.setenv(CHOICE, name)
                outs.append(linear(x, pack(weight, torch.float32)))
            assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.usefixtures("way")
def test_rows_of_any_stride_and_dimensions_are_taken() -> None:
    weight = torch.randn(40, 33)
    packed = pack(weight, torch.float32)
    wide = torch.randn(6, 70)
    for x in (wide[:, 3:36], wide[::2, 3:36], wide.flatten()[1:34], wide[:, :66].view(6, 2, 33), wide[:0, :33]):
        torch.testing.assert_close(linear(x, packed), x @ weight.T, rtol=1e-5, atol=1e-5)
    transposed = torch.randn(33, 40)
    x = wide[:, :33].contiguous()
    torch.testing.assert_close(linear(x, pack(transposed.T, torch.float32)), x @ transposed, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_changes_nothing(dtype: torch.dtype) -> None:
    weight = torch.randn(700, 513).bfloat16()
    before = torch.get_num_threads()
    try:
        for num_rows in (1, 9, 40, 300):
            x = torch.randn(num_rows, 513).to(dtype)
            outs = []
            for num_threads in (1, 2):
                torch.set_num_threads(num_threads)
                outs.append(linear(x, pack(weight, dtype)))
            assert all(torch.equal(out, outs[0]) for out in outs)
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_rows", "outputs", "columns"), [(40, 333, 600), (26, 75, 33), (97, 75, 1030), (517, 75, 520)]
)
def test_a_row_comes_out_the_same_whatever_rows_stand_beside_it(
    num_rows: int, outputs: int, columns: int, dtype: torch.dtype
) -> None:
    packed, x = pack(torch.randn(outputs, columns).bfloat16(), dtype), torch.randn(num_rows, columns).to(dtype)
    whole = linear(x, packed)
    for first in (0, 9):
        for count in (*range(1, 15), 17):
            assert torch.equal(linear(x[first : first + count], packed), whole[first : first + count])


@pytest.mark.usefixtures("isa")
def test_bfloat16_weights_are_kept_once_in_two_bytes() -> None:
    weight = torch.randn(64, 96).bfloat16()
    assert pack(weight, torch.float32).num_bytes == 2 * weight.numel()
    assert pack(weight.float(), torch.float32).num_bytes == 4 * weight.numel()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_pass_through(dtype: torch.dtype) -> None:
    weight = torch.randn(70, 20).bfloat16()
    weight[69, 3], weight[5, 0] = float("nan"), float("inf")
    out = linear(torch.ones(3, 20, dtype=dtype), pack(weight, dtype))
    assert out[:, 69].isnan().all()
    assert out[:, 5].isposinf().all()
    assert out.isfinite().sum() == 3 * 68


def test_an_unknown_choice_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CHOICE, "sse9")
    with pytest.raises(
        ValueError, match="WEFT_CPU_KERNELS: expected one of avx2, avx512, avx512_bf16, amx, torch, found 'sse9'"
    ):
        pack(torch.ones(1, 1), torch.float32)


@pytest.mark.skipif(not ISAS, reason="no build for this processor")
def test_without_a_compiler_torch_does_the_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WEFT_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "no-such-compiler")
    load.cache_clear()
    try:
        weight, x = torch.randn(9, 5), torch.randn(3, 5)
        packed = pack(weight, torch.float32)
        assert packed.library is None
        assert "no C++ compiler found" in caplog.text
        torch.testing.assert_close(linear(x, packed), x @ weight.T)
    finally:
        load.cache_clear()


def test_a_library_is_built_once(isa: str) -> None:
    library = load(isa)
    assert isinstance(library, ctypes.CDLL)
    assert load(isa) is library


def test_the_processor_is_seen_as_torch_sees_it() -> None:
    capability = torch.backends.cpu.get_cpu_capability().lower()
    features = torch.cpu.get_capabilities()
    assert (most_isa() == "torch") == (capability not in ("avx2", "avx512"))
    assert most_isa().startswith("avx512") or most_isa() == "amx" or capability != "avx512"
    assert (most_isa() in ("avx512_bf16", "amx")) == bool(features.get("avx512_bf16"))


@pytest.mark.parametrize(
    ("features", "lets", "most"),
    [
        ("", True, "torch"),
        ("avx2", True, "torch"),
        ("avx2 fma", True, "avx2"),
        ("avx2 fma avx512f avx512bw avx512dq", True, "avx2"),
        ("avx2 fma avx512f avx512bw avx512dq avx512vl amx_bf16 amx_tile", True, "avx512"),
        ("avx2 fma avx512f avx512bw avx512dq avx512vl avx512_bf16", True, "avx512_bf16"),
        ("avx2 fma avx512f avx512bw avx512dq avx512vl avx512_bf16 amx_bf16 amx_tile", True, "amx"),
        ("avx2 fma avx512f avx512bw avx512dq avx512vl avx512_bf16 amx_bf16 amx_tile", False, "avx512_bf16"),
    ],
)
def test_each_set_needs_those_before_it(features: str, lets: bool, most: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "is_supported_machine", lambda: True)
    monkeypatch.setattr(processor, "processor_features", lambda: frozenset(features.split()))
    monkeypatch.setattr(processor, "may_use_amx", lambda: lets)
    assert processor.most_isa.__wrapped__() == most


@pytest.mark.parametrize(("from_intel", "chosen"), [(True, "avx512"), (False, "avx512_bf16")])
def test_pairs_of_bfloat16_are_left_to_processors_that_are_quick_at_them(
    from_intel: bool, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processor, "most_isa", lambda: "avx512_bf16")
    monkeypatch.setattr(processor, "is_from_intel", lambda: from_intel)
    assert processor.best_isa.__wrapped__() == chosen
