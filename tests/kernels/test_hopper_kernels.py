"""F12 words times left rows in the tiles that only a Hopper has: as the unpacked matrix would, and always the same."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.kernels.device import DEVICE

pytest.importorskip("triton")

from weft_kernels.packed import F12, hopper, pack_f12
from weft_kernels.packed.linear import gemm
from weft_kernels.packed.scratch import ABSENT, absent_sums, counters

# fewer tiles than programs, more, one more than there are programs, and not a whole number of anything
SHAPES = [
    (64, 256),
    (202, 512),
    (1000, 2048),
    (6144, 4096),
    (1024, 14_336),
    (64 * 265, 512),
    (128 * 133, 1024),
    (40_003, 256),
]
is_hopper = DEVICE == "cuda" and torch.cuda.get_device_capability()[0] == 9
on_hopper = pytest.mark.skipif(not is_hopper, reason="needs a Hopper GPU")
ROWS = [2, 8, 9, 16, 20, 32, 40, 64, 100, 128, 200, 256, 700]
TRIES = 8


def make_weight(rows: int, columns: int) -> Tensor:
    """Ordinary weights; many of one row, and some of all, have no code; blocks of rows have bases of their own."""
    generator = torch.Generator().manual_seed(rows + columns)
    weight = torch.randn(rows, columns, generator=generator) * 0.02
    weight *= 2.0 ** (torch.arange(rows) // 64 % 5)[:, None]
    weight.view(-1)[:: 3000 if columns > 512 else 300] = 1e-9
    weight[0, :200] = 1e-12
    weight[rows - 1, columns - 1] = 300.0
    weight[rows // 2] = 0
    return weight.bfloat16().to(DEVICE)


def agrees(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    error = ((found.double() - expected).norm() / expected.norm()).item()
    return error < 4e-3 and bool(found.isfinite().all())


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("num_rows", ROWS)
def test_products_are_those_of_the_unpacked_matrix_and_always_the_same(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: dict[int, Tensor] = {}

    def remembered(device: torch.device, num_items: int) -> Tensor:
        parts[num_items] = absent_sums(device, num_items)
        return parts[num_items]

    monkeypatch.setattr(hopper, "absent_sums", remembered)
    for rows, columns in SHAPES:
        weight, bias = make_weight(rows, columns), torch.randn(rows, device=DEVICE).bfloat16()
        packed, x = pack_f12(weight), torch.randn(num_rows, columns, device=DEVICE).bfloat16()
        assert hopper.can_run(x, packed)
        for tiles in hopper.candidates(num_rows):
            about = f"{rows} x {columns}, {num_rows} rows, {tiles}"
            # with no max_polls, where all add up, those that come later do what the others have left
            max_polls = 0, hopper.MAX_POLLS
            found = [gemm(x, packed, bias, {**tiles, "MAX_POLLS": max_polls[turn % 2]}) for turn in range(TRIES)]
            assert agrees(found[0], x, weight, bias), about
            assert all(torch.equal(found[0], each) for each in found), about
            assert not counters(x.device, hopper.NUM_COUNTERS).any(), about
            assert all((each == ABSENT).all() for each in parts.values()), about


@pytest.mark.gpu
@on_hopper
def test_a_weight_that_is_no_number_spoils_its_own_output_alone() -> None:
    weight = make_weight(200, 512)
    weight[65, 3] = float("nan")
    for num_rows in (2, 16, 40, 128, 256):
        x = torch.randn(num_rows, 512, device=DEVICE).bfloat16()
        found = gemm(x, pack_f12(weight), None, hopper.candidates(num_rows)[0])
        assert found[:, 65].isnan().all()
        assert found.isnan().sum() == num_rows


@pytest.mark.parametrize("num_rows", ROWS)
def test_all_programs_of_a_launch_fit_on_the_gpu_at_once(num_rows: int) -> None:
    """Those that share a tile wait for others of them. Registers here, shared memory in `test_compile`."""
    for tiles in hopper.candidates(num_rows):
        warps = 4 * tiles["PARTS"] + 4
        assert tiles.get("MAX_REGS", 168) * 32 * warps * tiles["PER_MULTIPROCESSOR"] <= 65_536
        assert tiles["BLOCK_M"] >= min(128, num_rows)
        assert not tiles.get("PING_PONG") or tiles["PARTS"] == 2
        assert tiles["BLOCK_J"] in (16, 32)


def test_what_is_not_on_such_a_gpu_does_not_fit() -> None:
    weight = pack_f12(torch.randn(64, 256).bfloat16())
    assert isinstance(weight, F12)
    assert not hopper.can_run(torch.randn(3, 256).bfloat16(), weight)


class Split:
    """How a product is split, by the kernel's own arithmetic with numbers instead of registers."""

    def __init__(
        self,
        programs: int,
        num_tiles: int,
        steps: int,
        is_even: bool,
        all_add_up: bool,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        from weft_kernels.packed.hopper import stream_k

        names = "first_step", "program_of_step", "in_order", "step_at", "segment_at"
        self.first_step, self.program_of_step, self.in_order, self.step_at, self.segment_at = (
            getattr(each, "fn", each) for each in (getattr(stream_k, name) for name in names)
        )
        monkeypatch.setattr(stream_k, "step_at", self.step_at)
        self.here = SimpleNamespace(minimum=min, where=lambda yes, one, other: one if yes else other)
        monkeypatch.setattr(stream_k, "gl", self.here)
        self.steps, most, self.all_add_up = steps, min(programs, num_tiles * steps), all_add_up
        self.programs, self.own_tiles, self.split_tiles, self.sharers = hopper.split(num_tiles, steps, most, is_even)
        self.total = self.split_tiles * steps

    def segments(self) -> Iterator[tuple[int, int, int, int, int, bool]]:
        """Program, how many steps it has done before, tile, first and last step of it, and whether it is the last."""
        for program in range(self.programs):
            self.here.program_id = lambda axis, program=program: program
            first, last = (self.first_step(each, self.sharers, self.total) for each in (program, program + 1))
            num_first, num_last = self.in_order(first, last, self.steps, self.all_add_up)
            count = num_first + self.own_tiles * self.steps + num_last
            shared = self.programs, first, num_first, num_last, self.split_tiles, self.sharers
            work = (*shared, count, self.steps, 1, 1, 1)
            i = 0
            assert count
            while i < count:
                tile, begin, end = self.segment_at(i, work)
                steps = [self.step_at(i + each, work) - tile * self.steps for each in range(end - begin)]
                assert steps == list(range(begin, end))
                yield program, i, tile, begin, end, i + end - begin == count
                i += end - begin
            assert i == count

    def sharing(self, tile: int) -> range:
        """The programs that have parts of a tile."""
        start = tile * self.steps
        first, last = (self.program_of_step(each, self.sharers, self.total) for each in (start, start + self.steps - 1))
        return range(first, last + 1)

    def places(self, tile: int) -> dict[int, int]:
        """Where all that add up look for the parts of a tile, by program."""
        first_step, start = self.first_step, tile * self.steps
        return {each: 2 * each + (first_step(each, self.sharers, self.total) < start) for each in self.sharing(tile)}


@pytest.mark.parametrize("programs", [1, 2, 114, 132, 264])
@pytest.mark.parametrize("steps", [1, 2, 7, 16])
@pytest.mark.parametrize("is_even", [False, True])
def test_each_step_is_one_programs_and_parts_are_where_they_are_added_up(
    programs: int, steps: int, is_even: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 272 tiles of 20 steps, 264 programs once waited for parts that nobody had."""
    pytest.importorskip("triton.experimental.gluon")
    for num_tiles in (1, 2, 40, 131, programs, programs + 1, 2 * programs + 8):
        split = Split(programs, num_tiles, steps, is_even, True, monkeypatch)
        done: dict[int, list[int]] = {}
        parts: dict[int, dict[int, int]] = {}
        for program, before, tile, begin, end, _ in split.segments():
            done.setdefault(tile, []).extend(range(begin, end))
            if end - begin < steps:
                parts.setdefault(tile, {})[program] = 2 * program + (before > 0)
        assert {tile: sorted(each) for tile, each in done.items()} == {t: list(range(steps)) for t in range(num_tiles)}
        assert parts == {tile: split.places(tile) for tile in parts}
        if is_even and split.split_tiles:
            assert split.sharers % split.split_tiles == 0
            assert len({len(each) for each in parts.values()}) <= 1


@pytest.mark.parametrize("programs", [1, 2, 114, 132, 264])
@pytest.mark.parametrize("steps", [1, 2, 7, 16])
@pytest.mark.parametrize("is_even", [False, True])
def test_who_has_a_tiles_end_waits_for_programs_before_it_that_put_down_their_parts_first(
    programs: int, steps: int, is_even: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a part for another one, if any, before all else, and adds up after all else."""
    pytest.importorskip("triton.experimental.gluon")
    for num_tiles in (1, 2, 40, 131, programs, programs + 1, 2 * programs + 8):
        split = Split(programs, num_tiles, steps, is_even, False, monkeypatch)
        done: dict[int, list[int]] = {}
        parts: dict[int, list[int]] = {}
        ends: dict[int, int] = {}
        for program, before, tile, begin, end, is_last in split.segments():
            done.setdefault(tile, []).extend(range(begin, end))
            if end < steps:
                assert before == 0
                parts.setdefault(tile, []).append(program)
            elif begin > 0:
                assert is_last
                ends[tile] = program
        assert {tile: sorted(each) for tile, each in done.items()} == {t: list(range(steps)) for t in range(num_tiles)}
        assert ends.keys() == parts.keys()
        for tile, program in ends.items():
            assert parts[tile] == list(split.sharing(tile))[:-1]
            assert program == parts[tile][-1] + 1
