"""The Transfer Engine for real, over loopback TCP, and how its work is cut."""

from __future__ import annotations

import asyncio
import builtins
import ctypes
import gc
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.kv import mooncake
from weft.kv.mooncake import MooncakeTransport, MooncakeUnavailable
from weft.kv.transport import CopyRange, Endpoint, KvSource, TransferFailed, coalesce
from weft.request import RequestKey

MIB = 1024 * 1024


class Side:
    """A transport and its registered memory."""

    def __init__(self, size: int, fill: int) -> None:
        self.memory = (ctypes.c_ubyte * size)()
        self.address = ctypes.addressof(self.memory)
        self.fill(fill)
        self.transport = MooncakeTransport("127.0.0.1")
        self.transport.register(self.address, size)

    def fill(self, value: int) -> None:
        ctypes.memset(self.memory, value, len(self.memory))

    def lender(self) -> KvSource:
        return KvSource(self.transport.endpoint(), "127.0.0.1:1", RequestKey("r"))


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[Side, Side]]:
    """Lender and borrower, 8 MiB each. The end of each takes a second of the library's."""
    lender, borrower = Side(8 * MIB, 7), Side(8 * MIB, 1)
    yield lender, borrower
    asyncio.run(borrower.transport.close())
    asyncio.run(lender.transport.close())


@pytest.fixture
def sides(both: tuple[Side, Side]) -> tuple[Side, Side]:
    """The lender full of 7s, the borrower full of 1s."""
    for side, fill in zip(both, (7, 1), strict=True):
        side.fill(fill)
    return both


async def test_a_closed_transport_leaves_nothing_for_the_garbage_collector() -> None:
    async def threads_of_one() -> int:
        lender, borrower = Side(MIB, 7), Side(MIB, 1)
        await borrower.transport.pull(lender.lender(), [CopyRange(lender.address, borrower.address, MIB)], 10)
        most = count_threads()
        await borrower.transport.close()
        await lender.transport.close()
        await lender.transport.close()  # once more changes nothing
        return most

    gc.disable()
    try:
        await threads_of_one()  # the library keeps some of its first one's
        before = await steady_count()
        most = await threads_of_one()
        assert most > before
        async with asyncio.timeout(10):
            while count_threads() != before:  # noqa: ASYNC110 - the kernel's
                await asyncio.sleep(0.01)
    finally:
        gc.enable()


async def steady_count() -> int:
    """Of threads. One that was joined is there for a moment more."""
    before = -1
    while (now := count_threads()) != before:
        before = now
        await asyncio.sleep(0.1)
    return now


def count_threads() -> int:
    """Of this process, the libraries' own included."""
    return len(list(Path("/proc/self/task").iterdir()))


async def test_a_pull_copies_these_runs_and_nothing_else(sides: tuple[Side, Side]) -> None:
    lender, borrower = sides
    await borrower.transport.connect(lender.transport.endpoint())
    ctypes.memset(lender.address + 100, 9, 50)
    runs = [
        CopyRange(lender.address + 100, borrower.address + 300, 50),
        CopyRange(lender.address, borrower.address + MIB, 2 * MIB),
    ]
    await borrower.transport.pull(lender.lender(), runs, 10)
    copied = bytes(borrower.memory)
    assert copied[300:350] == b"\x09" * 50
    assert copied[MIB : MIB + 100] == b"\x07" * 100
    assert copied[:300] + copied[350:MIB] == b"\x01" * (MIB - 50)
    assert copied[3 * MIB :] == b"\x01" * (5 * MIB)


async def test_more_entries_than_the_library_queues_arrive_all(sides: tuple[Side, Side]) -> None:
    lender, borrower = sides
    # every other 512 bytes: nothing can be joined
    runs = [CopyRange(lender.address + at, borrower.address + at, 512) for at in range(0, 4 * MIB, 1024)]
    await borrower.transport.pull(lender.lender(), runs, 20)
    copied = bytes(borrower.memory)
    assert copied[: 4 * MIB] == (b"\x07" * 512 + b"\x01" * 512) * (4 * 1024)


async def test_a_peer_that_is_gone_fails_the_pull(sides: tuple[Side, Side]) -> None:
    _, borrower = sides
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = Endpoint("mooncake", f"127.0.0.1:{unused.getsockname()[1]}", 4096)
        await borrower.transport.connect(endpoint)
        with pytest.raises(TransferFailed):
            await borrower.transport.pull(
                KvSource(endpoint, "", RequestKey("r")), [CopyRange(4096, borrower.address, 4096)], 10
            )


async def test_memory_that_is_not_lent_cannot_be_read(sides: tuple[Side, Side]) -> None:
    lender, borrower = sides
    with pytest.raises(TransferFailed):
        await borrower.transport.pull(lender.lender(), [CopyRange(4096, borrower.address, 4096)], 10)
    good = CopyRange(lender.address, borrower.address, 4096)
    await borrower.transport.pull(lender.lender(), [good], 10)
    assert bytes(borrower.memory[:4096]) == b"\x07" * 4096


async def test_no_batch_begins_after_the_deadline(sides: tuple[Side, Side]) -> None:
    lender, borrower = sides
    with pytest.raises(TransferFailed):
        await borrower.transport.pull(lender.lender(), [CopyRange(lender.address, borrower.address, 4096)], -1.0)
    assert bytes(borrower.memory[:4096]) == b"\x01" * 4096


@contextmanager
def without_mooncake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a machine that lacks the library or what it needs."""
    real_import = builtins.__import__

    def fail(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("mooncake"):
            raise ImportError("libibverbs.so.1: cannot open shared object file")
        return real_import(name, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", fail)
        yield


def test_a_machine_without_the_library_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with without_mooncake(monkeypatch), pytest.raises(MooncakeUnavailable, match="libibverbs"):
        MooncakeTransport("127.0.0.1")


def test_rdma_and_tcp_do_not_read_from_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine:
        def initialize(self, *arguments: str) -> int:
            return 0

        def get_rpc_port(self) -> int:
            return 1

    library: Any = ModuleType("mooncake.engine")
    library.TransferEngine = Engine
    monkeypatch.setitem(sys.modules, "mooncake.engine", library)
    tcp, rdma = (MooncakeTransport("127.0.0.1", protocol) for protocol in ("tcp", "rdma"))
    assert [way.reaches(peer.endpoint()) for way in (tcp, rdma) for peer in (tcp, rdma)] == [True, False, False, True]


class CountingEngine:
    """A Transfer Engine whose transfers end some questions later; it remembers how many were under way."""

    def __init__(self, patience: list[int]) -> None:
        self.patience = patience
        self.transfers: dict[int, CopyRange] = {}
        self.left: dict[int, int] = {}
        self.most, self.most_bytes = 0, 0

    def batch_transfer_async_read(self, segment: str, local: list[int], remote: list[int], size: list[int]) -> int:
        number = len(self.transfers) + 1
        self.transfers[number] = CopyRange(remote[0], local[0], size[0])
        self.left[number] = self.patience[number % len(self.patience)]
        self.most = max(self.most, len(self.left))
        self.most_bytes = max(self.most_bytes, sum(self.transfers[each].size_bytes for each in self.left))
        return number

    def transfer_check_status(self, number: int) -> int:
        if self.left[number]:
            self.left[number] -= 1
            return 0
        del self.left[number]  # asking once more would be a KeyError
        return -1 if self.transfers[number].remote_address == BAD else 1


BAD = 13 * 10_000


@given(
    st.lists(st.integers(1, 5000), max_size=60),
    st.integers(1, 8),
    st.integers(64, 4096),
    st.lists(st.integers(0, 2), min_size=1),
)
def test_transfers_are_bounded_lose_nothing_and_are_all_over_at_the_end(
    sizes: list[int], max_in_flight: int, max_bytes: int, patience: list[int]
) -> None:
    runs = [CopyRange(i * 10_000, i * 20_000, size) for i, size in enumerate(sizes)]
    engine = CountingEngine(patience)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mooncake, "MAX_IN_FLIGHT", max_in_flight)
        patch.setattr(mooncake, "MAX_IN_FLIGHT_BYTES", max_bytes)
        patch.setattr(mooncake, "MAX_RUN_BYTES", max_bytes)
        patch.setattr(mooncake, "LONGEST_NAP_SECONDS", 0.0)
        pull = mooncake.Pull(engine, "peer", runs, time.monotonic() + 60)
        if any(run.remote_address == BAD for run in runs):
            with pytest.raises(TransferFailed):
                pull.run()
        else:
            pull.run()
            assert coalesce(list(engine.transfers.values())) == coalesce(runs)
    assert engine.left == {}
    assert engine.most <= max_in_flight
    assert engine.most_bytes <= max_bytes


def test_neighbours_are_joined_only_when_they_are_neighbours_on_both_sides() -> None:
    runs = [
        CopyRange(0, 100, 10),
        CopyRange(10, 110, 10),
        CopyRange(20, 130, 10),
        CopyRange(40, 140, 10),
        CopyRange(50, 150, 5),
    ]
    assert coalesce(runs) == [CopyRange(0, 100, 20), CopyRange(20, 130, 10), CopyRange(40, 140, 15)]
