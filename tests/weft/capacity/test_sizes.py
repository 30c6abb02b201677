"""What a worker takes is known before it takes it: by the plan's figures, checked against what is really there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.weft.tiny_families import FAMILIES, TinyFamily

from weft.capacity.sizes import Machine, MemoryBudget, default_num_blocks, estimate_budget, measured_budget
from weft.errors import BadCheckpoint

CPU = Machine("cpu", "float32", 16)


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_left_is_what_weights_and_activations_leave(name: str, family_of: Callable[[str], TinyFamily]) -> None:
    """That weights are what a worker holds is in `test_allocation.py`."""
    room = estimate_budget(family_of(name).config, CPU, 64, 8, 1 << 40)
    assert room.available_for_kv == room.free - room.weights - room.activations
    assert room.weights > 0
    assert room.activations > 0


def test_room_to_unpack_in_is_kept_where_something_is_packed(family_of: Callable[[str], TinyFamily]) -> None:
    """F12 is a form of bfloat16: computed in float32, nothing of it is packed on a GPU."""
    config = family_of("llama2").config
    rooms = {
        (dtype, is_resident): estimate_budget(config, Machine("cuda", dtype, 64, is_resident), 64, 8, 1 << 40)
        for dtype in ("float32", "bfloat16")
        for is_resident in (False, True)
    }
    assert rooms["float32", True] == rooms["float32", False]
    assert rooms["bfloat16", True].activations > rooms["bfloat16", False].activations
    assert rooms["bfloat16", True].weights < rooms["bfloat16", False].weights


def test_a_gpu_leaves_room_for_its_libraries_and_counts_the_dtype_that_it_runs(
    family_of: Callable[[str], TinyFamily],
) -> None:
    config = family_of("llama2").config
    there = estimate_budget(config, Machine("cuda", "bfloat16", 64), 64, 8, 1 << 40)
    here = estimate_budget(config, CPU, 64, 8, 1 << 40)
    assert 2 * there.weights == here.weights
    assert there.available_for_kv == there.free - there.weights - there.activations - (1 << 30)


def test_what_was_measured_replaces_what_was_planned() -> None:
    planned = MemoryBudget(free=80 << 30, weights=15 << 30, activations=1 << 30, available_for_kv=63 << 30)
    assert measured_budget(planned, 64 << 30, 3 << 30) == MemoryBudget(
        80 << 30, 16 << 30, 3 << 30, (61 << 30) - (1 << 29)
    )


def test_what_does_not_fit_is_refused_with_the_figures() -> None:
    room = MemoryBudget(free=3 << 30, weights=2 << 30, activations=1 << 29, available_for_kv=1 << 29)
    room.check(1 << 29, "KV")
    with pytest.raises(
        BadCheckpoint,
        match=r"takes 2\.00 GiB for weights, 0\.50 GiB for activations and 1\.00 GiB for KV of 1024 tokens, and 3\.00",
    ):
        room.check(1 << 30, "KV of 1024 tokens")


def test_the_pool_is_bounded_by_need_and_by_memory() -> None:
    room = MemoryBudget(free=100_000, weights=0, activations=0, available_for_kv=100_000)
    assert default_num_blocks(room, False, 1000, least=2, most=500) == 100
    assert default_num_blocks(room, True, 1000, least=2, most=500) == 25
    assert default_num_blocks(room, False, 1000, least=2, most=50) == 50
    assert default_num_blocks(room, True, 60_000, least=1, most=50) == 1
