"""Ranks that share memory get the bits of the reference, whatever their order and the size of what they sum."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

from weft.kv.memfd import create_shared_memory, map_file
from weft_kernels.collectives import join_columns, sum_in_order
from weft_kernels.collectives.shared import SLOT_BYTES, GroupLost, SharedComm, shared_bytes

pytestmark = pytest.mark.usefixtures("isa")


def on_ranks(size: int, work: Callable[[SharedComm], Any], deadline_seconds: float = 60.0) -> list[Any]:
    """Return the results of threads that each have a mapping of the memory."""
    shared = create_shared_memory(shared_bytes(size), "weft-test-group")
    assert shared is not None
    addresses = [map_file(os.dup(shared.fd), shared_bytes(size), is_writable=True) for _ in range(size)]
    with ThreadPoolExecutor(size) as pool:
        comms = [SharedComm(rank, size, address, deadline_seconds) for rank, address in enumerate(addresses)]
        return list(pool.map(work, comms))


def parts_of(size: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """Numbers of very different size, so that every order of additions gives other bits."""
    generator = torch.Generator().manual_seed(size)
    exponents = torch.randint(-12, 12, (size, *shape), generator=generator)
    return list((torch.randn(size, *shape, generator=generator) * 2.0**exponents).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_have_the_bits_of_the_reference_on_every_rank(size: int, dtype: torch.dtype) -> None:
    shapes = [(1, 8), (3, 37), (0, 16), (5, 4096), (700, 1024)]
    parts = {shape: parts_of(size, shape, dtype) for shape in shapes}
    assert any(not torch.equal(sum_in_order(each), sum_in_order(each[::-1])) for each in parts.values()) or size == 2

    def work(comm: SharedComm) -> list[torch.Tensor]:
        return [comm.sum(parts[shape][comm.rank].clone()) for shape in shapes for _ in range(5)]

    expected = [sum_in_order(parts[shape]) for shape in shapes for _ in range(5)]
    for found in on_ranks(size, work):
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def gathered(parts: list[torch.Tensor], widths: list[int], comm: SharedComm) -> torch.Tensor:
    return comm.gather(parts[comm.rank], widths)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_leader_gathers_columns_of_different_widths(dtype: torch.dtype) -> None:
    widths = [57, 57, 3]
    for rows in (0, 1, 9, SLOT_BYTES // 64):
        parts = [torch.randn(rows, width).to(dtype) for width in widths]
        found = on_ranks(3, partial(gathered, parts, widths))
        assert torch.equal(found[0], join_columns(parts))
        assert found[1] is parts[1]


def test_collectives_of_all_kinds_follow_each_other() -> None:
    def work(comm: SharedComm) -> list[float]:
        results = []
        for turn in range(300):
            time.sleep(0.001 * ((turn * 7 + comm.rank * 3) % 2))
            results.append(float(comm.sum(torch.full((1, 8), float(turn + comm.rank)))[0, 0]))
            gathered = comm.gather(torch.full((2, comm.rank + 1), float(turn)), [1, 2])
            assert comm.rank or gathered.tolist() == [[turn] * 3] * 2
        return results

    assert on_ranks(2, work) == [[2.0 * turn + 1 for turn in range(300)]] * 2


def test_a_rank_that_does_not_come_is_named() -> None:
    def work(comm: SharedComm) -> str:
        if comm.rank == 2:
            return ""
        with pytest.raises(GroupLost, match=r"rank 2 did not answer for 0\.3 s"):
            comm.sum(torch.ones(1, 8))
        with pytest.raises(GroupLost):
            comm.check()
        return "told"

    assert on_ranks(3, work, deadline_seconds=0.3) == ["told", "told", ""]


def test_waiting_ends_when_a_rank_is_known_to_be_gone() -> None:
    begun = threading.Event()

    def work(comm: SharedComm) -> float:
        if comm.rank == 1:
            assert begun.wait(10)
            comm.lose()
            return 0.0
        start = time.monotonic()
        begun.set()
        with pytest.raises(GroupLost, match="a rank is gone"):
            comm.sum(torch.ones(1, 8))
        return time.monotonic() - start

    assert on_ranks(2, work)[0] < 30


def _child(fd: int, rank: int, results: Any) -> None:
    comm = SharedComm(rank, 2, map_file(fd, shared_bytes(2), is_writable=True))
    results.put((rank, [comm.sum(torch.full((4, 64), float(turn * (rank + 1)))).sum().item() for turn in range(50)]))


def test_processes_share_sums_too() -> None:
    shared = create_shared_memory(shared_bytes(2), "weft-test-group")
    assert shared is not None
    forks = multiprocessing.get_context("fork")
    results = forks.SimpleQueue()
    children = [forks.Process(target=_child, args=(os.dup(shared.fd), rank, results)) for rank in range(2)]
    for child in children:
        child.start()
    found = dict(results.get() for _ in children)
    for child in children:
        child.join(30)
    assert found[0] == found[1] == [3.0 * turn * 256 for turn in range(50)]
