"""Tiles that were found to be quickest: used for their shapes, kept for their device, and no reason to fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.kernels.device import DEVICE, close

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources, PTXASError

from weft_kernels.packed import hopper, pack_f12
from weft_kernels.packed import linear as packed_linear
from weft_kernels.packed.linear import gemm, linear_packed, tiles_table, tune
from weft_kernels.packed.tuning import Tiles, TuningTable, candidates

IDENTITY = {"device": "one", "triton": "3"}
QUICK: Tiles = {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 256, "num_warps": 4, "num_stages": 2}
SLOW: Tiles = {**QUICK, "num_stages": 4}
REFUSED: Tiles = {**QUICK, "num_stages": 3}
UNASSEMBLED: Tiles = {**QUICK, "num_warps": 8}
SHAPE = ("F12", 33, 256, 17)


def seconds(tiles: Tiles) -> float:
    if tiles is REFUSED:
        raise OutOfResources(2, 1, "shared memory")
    if tiles is UNASSEMBLED:
        raise PTXASError("too many registers")
    return 1.0 if tiles is QUICK else 2.0


def test_the_quickest_is_kept_for_its_shape_and_device(tmp_path: Path) -> None:
    table = TuningTable(tmp_path, IDENTITY)
    assert table.tune(SHAPE, [SLOW, REFUSED, UNASSEMBLED, QUICK], seconds) == QUICK
    assert table.tune(("F12", 1, 1, 1), [REFUSED, UNASSEMBLED], seconds) is None
    table.save()
    again = TuningTable(tmp_path, IDENTITY)
    assert again.digest == table.digest != TuningTable(tmp_path / "elsewhere", IDENTITY).digest
    assert again.of(*SHAPE) == again.of("F12", 33, 256, 32) == QUICK
    assert again.of("F12", 33, 256, 33) is again.of("Fp8", 33, 256, 17) is again.of("F12", 33, 257, 17) is None
    assert TuningTable(tmp_path, {**IDENTITY, "triton": "4"}).of(*SHAPE) is None
    assert [path.name for path in tmp_path.iterdir()] == [table.path.name]


def test_tables_that_are_saved_at_the_same_time_keep_each_others_tiles(tmp_path: Path) -> None:
    one, two = TuningTable(tmp_path, IDENTITY), TuningTable(tmp_path, IDENTITY)
    one.tune(SHAPE, [QUICK], seconds)
    two.tune(("F12", 5, 5, 5), [SLOW], seconds)
    one.save()
    two.save()
    assert two.of(*SHAPE) == QUICK
    both = TuningTable(tmp_path, IDENTITY)
    assert (both.of(*SHAPE), both.of("F12", 5, 5, 5), both.digest) == (QUICK, SLOW, two.digest)
    one.tune(SHAPE, [SLOW], seconds)
    one.save()
    assert TuningTable(tmp_path, IDENTITY).of(*SHAPE) == SLOW, "what was found last"


def test_one_process_measures_at_a_time_and_the_next_one_knows_what_it_found(tmp_path: Path) -> None:
    one, two = TuningTable(tmp_path, IDENTITY), TuningTable(tmp_path, IDENTITY)
    with one.exclusive(0.0) as is_alone:
        assert is_alone
        with two.exclusive(0.0) as is_second:
            assert not is_second
        one.tune(SHAPE, [QUICK], seconds)
        one.save()
    with two.exclusive(0.0) as is_alone:
        assert is_alone
        assert two.of(*SHAPE) == QUICK


@pytest.mark.parametrize("content", ["", "[]", '{"identity": {}}', '{"identity": {}, "tiles": {"a": {"b": "c"}}}'])
def test_a_damaged_table_is_an_empty_one(tmp_path: Path, content: str) -> None:
    TuningTable(tmp_path, IDENTITY).path.write_text(content)
    assert TuningTable(tmp_path, IDENTITY).of(*SHAPE) is None


@pytest.mark.parametrize("form", ["F12", "Fp8"])
@pytest.mark.parametrize("num_rows", [2, 16, 70, 1000])
def test_candidates_are_tiles_that_a_product_can_have(form: str, num_rows: int) -> None:
    tried = candidates(form, num_rows)
    assert len(tried) >= 9
    assert all(each["BLOCK_M"] >= min(64, num_rows) and each["BLOCK_K"] % 128 == 0 for each in tried)


@pytest.mark.usefixtures("own_tables")
def test_a_product_is_the_same_in_the_tiles_that_were_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(70, 512, generator=torch.Generator().manual_seed(1)).bfloat16().to(DEVICE)
    x, packed = torch.randn(3, 512, device=DEVICE), pack_f12(weight)
    tried: list[Tensor] = []

    def timed(calls: Sequence[Callable[[], Tensor]]) -> float:
        tried.append(calls[0]())
        return float(len(tried) != 2)

    monkeypatch.setattr(packed_linear, "candidates", lambda form, num_rows: [SLOW, QUICK, {**QUICK, "BLOCK_N": 64}])
    assert tune(x, [packed], timed) == QUICK
    monkeypatch.setattr(packed_linear, "_tiles", lambda *sizes: pytest.fail("what was tuned is not used"))
    for each in (*tried, gemm(x, packed)):
        close(each, x @ weight.float().T, factor=30)


@pytest.mark.usefixtures("own_tables")
def test_tiles_that_others_need_a_hopper_for_are_not_used_elsewhere() -> None:
    """As where rows lie otherwise than those that were tried."""
    weight = torch.randn(70, 512, generator=torch.Generator().manual_seed(3)).bfloat16()
    x, packed = torch.randn(3, 512), pack_f12(weight)
    table = tiles_table(x.device)
    assert table.tune(packed_linear._shape(x, packed), hopper.candidates(3), lambda tiles: 1.0) is not None
    assert not packed_linear.is_tuned(x, packed)
    if DEVICE == "cpu":
        close(gemm(x, packed), x @ weight.float().T, factor=30)


@pytest.mark.usefixtures("own_tables")
def test_rows_that_only_a_hopper_multiplies_with_words_are_tried_nowhere_else() -> None:
    weight = torch.randn(70, 512, generator=torch.Generator().manual_seed(4)).bfloat16()
    x, packed = torch.randn(200, 512), pack_f12(weight)
    assert tune(x, [packed], lambda calls: pytest.fail("tried")) is None
    tiles_table(x.device).tune(packed_linear._shape(x, packed), hopper.candidates(200), lambda tiles: 1.0)
    if DEVICE == "cpu":
        assert torch.equal(linear_packed(x, packed), functional.linear(x, weight.float()))


@pytest.mark.usefixtures("own_tables")
@pytest.mark.parametrize("num_rows", [129, 200, 256])
def test_beyond_the_usual_tiles_what_tuning_found_decides(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a Hopper; what is multiplied there, only a Hopper can tell."""
    weight = torch.randn(70, 256, generator=torch.Generator().manual_seed(5)).bfloat16()
    x, packed = torch.randn(num_rows, 256), pack_f12(weight)
    monkeypatch.setattr(hopper, "can_run", lambda x, weight: len(x) <= hopper.MOST_ROWS)
    monkeypatch.setattr(hopper, "gemm", lambda x, weight, bias, tiles: x.new_full((len(x), weight.rows), 7.0))
    monkeypatch.setattr(packed_linear, "unpack_rows", lambda weight: weight.unpack())
    unpacked, shape = functional.linear(x, weight.float()), packed_linear._shape(x, packed)
    assert torch.equal(linear_packed(x, packed), unpacked)
    assert tune(x, [packed], lambda calls: float((calls[0]() == 7.0).all())) == {"UNPACKED": 1}
    assert torch.equal(linear_packed(x, packed), unpacked)
    tiles_table(x.device).tune(shape, hopper.candidates(num_rows), lambda tiles: 1.0)
    assert (linear_packed(x, packed) == 7.0).all()
    long = torch.randn(hopper.MOST_ROWS + 1, 256)
    assert torch.equal(linear_packed(long, packed), functional.linear(long, weight.float()))


@pytest.mark.gpu
@pytest.mark.usefixtures("own_tables")
@pytest.mark.parametrize("is_unpacked", [False, True])
def test_prompts_of_middling_length_are_multiplied_as_tuning_found_best(
    is_unpacked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer ones are always unpacked first."""
    weight = torch.randn(1024, 2048, device=DEVICE).bfloat16()
    packed, x = pack_f12(weight), torch.randn(200, 2048, device=DEVICE).bfloat16()
    if not hopper.can_run(x, packed):
        pytest.skip("needs a Hopper GPU")
    shape, candidates = packed_linear._shape(x, packed), packed_linear._candidates(x, packed)
    tiles_table(x.device).tune(shape, candidates, lambda tiles: float(("UNPACKED" in tiles) != is_unpacked))
    expected = functional.linear(x, weight)
    with monkeypatch.context() as patched:
        other = (hopper, "gemm") if is_unpacked else (packed_linear, "_linear_unpacked")
        patched.setattr(*other, lambda *args: pytest.fail("tuning found the other way quicker"))
        found = linear_packed(x, packed)
    close(found / 64, expected / 64)
    long = torch.randn(hopper.MOST_ROWS + 1, 2048, device=DEVICE).bfloat16()
    assert torch.equal(linear_packed(long, packed), functional.linear(long, weight))
