"""Pulls, the quarantine of blocks that an aborted pull may still write, and the choice of transports."""

from __future__ import annotations

import asyncio
import ctypes
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from weft.asyncio_compat import background_tasks
from weft.errors import ConfigError
from weft.kv import transfer
from weft.kv.memfd import SharedMemory, create_shared_memory
from weft.kv.mooncake import MooncakeUnavailable
from weft.kv.transfer import BlockBytes, CopyRange, Endpoint, HostBlocks, KvSource, TransferFailed, Transport, checksums
from weft.options import TransportChoice
from weft.request import RequestKey
from weft.rpc.client import ChannelPool
from weft.rpc.grpc_transport import GrpcTransport
from weft.worker import kv_pull
from weft.worker.kv_pull import (
    OVERDUE_SECONDS,
    SAFETY_SECONDS,
    BlockCopy,
    ChecksumMismatch,
    KvPull,
    KvPuller,
    Quarantine,
    advertised_endpoint,
    choose_transports,
    needs_checksums,
)

LENDER = KvSource(Endpoint("scripted", "", 10_000), "peer:1", RequestKey("r"))
POOL = (ctypes.c_ubyte * 8192)()


@dataclass
class Scripted:
    """A transport whose pulls wait for `opening` and then end as scripted."""

    name: str = "scripted"
    failure: TransferFailed | None = None
    opening: asyncio.Event = field(default_factory=asyncio.Event)
    runs: list[CopyRange] = field(default_factory=list)

    def register(self, address: int, size_bytes: int) -> None:
        """Nothing."""

    def endpoint(self) -> Endpoint:
        return LENDER.endpoint

    def reaches(self, peer: Endpoint) -> bool:
        return peer.transport == self.name

    async def connect(self, peer: Endpoint) -> None:
        """Nothing."""

    async def pull(self, lender: KvSource, runs: Sequence[CopyRange], timeout_seconds: float) -> None:
        self.runs += runs
        await self.opening.wait()
        if self.failure:
            raise self.failure

    async def close(self) -> None:
        """Nothing."""


@dataclass
class Scene:
    """One pull, and the blocks whose quarantine has ended."""

    transport: Scripted
    memory: HostBlocks
    borrowing: KvPull
    returned: asyncio.Queue[Sequence[int]]


@pytest.fixture
async def scene(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    monkeypatch.setattr(kv_pull, "SAFETY_SECONDS", 0.0)
    monkeypatch.setattr(kv_pull, "SWEEP_SECONDS", 0.001)
    backing = (ctypes.c_ubyte * 64)(*range(64))
    memory = HostBlocks(ctypes.addressof(backing), 8, 8)
    returned: asyncio.Queue[Sequence[int]] = asyncio.Queue()
    transport = Scripted()
    async with background_tasks() as tasks:
        aside = Quarantine(returned.put_nowait)
        tasks.create_task(aside.run())
        borrower = KvPuller([transport, Scripted("other")], memory, tasks, aside)
        yield Scene(transport, memory, borrower.open(LENDER), returned)


async def test_a_pull_asks_for_these_blocks_and_counts_their_bytes(scene: Scene) -> None:
    scene.transport.opening.set()
    sums = checksums(scene.memory, [1, 6], [0, 0])
    await scene.borrowing.pull([BlockCopy(3, 1, sums[0]), BlockCopy(9, 6, sums[1])], 5)
    base = scene.memory.address
    assert scene.transport.runs == [CopyRange(10_024, base + 8, 8), CopyRange(10_072, base + 48, 8)]
    assert scene.borrowing.transferred_bytes == 16
    assert scene.borrowing.abort() == ()


async def test_a_wrong_checksum_is_noticed_and_leaves_nothing_suspect(scene: Scene) -> None:
    scene.transport.opening.set()
    with pytest.raises(ChecksumMismatch):
        await scene.borrowing.pull([BlockCopy(3, 1, 12345)], 5)
    assert scene.borrowing.abort() == ()


async def test_blocks_of_a_cancelled_pull_come_back_when_it_has_ended(scene: Scene) -> None:
    waiting = asyncio.create_task(scene.borrowing.pull([BlockCopy(0, 2), BlockCopy(1, 5)], 5))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert scene.borrowing.abort() == (2, 5)
    assert scene.borrowing.abort() == ()
    for _ in range(10):
        await asyncio.sleep(0)
    assert scene.returned.empty()
    scene.transport.opening.set()
    assert await scene.returned.get() == (2, 5)


async def test_blocks_of_a_pull_that_takes_too_long_come_back_when_it_has_ended(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_pull, "EXTRA_WAIT_SECONDS", 0.0)
    with pytest.raises(TimeoutError):
        await scene.borrowing.pull([BlockCopy(0, 4)], 0.01)
    assert scene.borrowing.abort() == (4,)
    assert scene.returned.empty()
    scene.transport.opening.set()
    assert await scene.returned.get() == (4,)


async def test_blocks_of_a_failed_pull_are_set_aside(scene: Scene) -> None:
    scene.transport.failure = TransferFailed("torn")
    scene.transport.opening.set()
    with pytest.raises(TransferFailed):
        await scene.borrowing.pull([BlockCopy(0, 7)], 5)
    assert scene.borrowing.abort() == (7,)
    assert await scene.returned.get() == (7,)


async def test_no_time_frees_a_block_before_its_pull_has_ended(caplog: pytest.LogCaptureFixture) -> None:
    now, returned = [0.0], list[Sequence[int]]()
    aside = Quarantine(returned.append, lambda: now[0])
    pull = asyncio.create_task(asyncio.Event().wait())
    aside.add({pull: (1, 2)})
    now[0] = OVERDUE_SECONDS + 1
    aside.sweep()
    assert "quarantined_blocks=2" in caplog.text
    now[0] = 1000 * OVERDUE_SECONDS
    aside.sweep()
    assert returned == []
    pull.cancel()
    await asyncio.wait([pull])
    aside.sweep()
    assert returned == []
    now[0] += SAFETY_SECONDS
    aside.sweep()
    assert returned == [(1, 2)]


async def test_a_lender_with_an_unknown_transport_is_read_through_the_last_of_ours(scene: Scene) -> None:
    async with background_tasks() as tasks:
        first, last = Scripted(), Scripted("grpc")
        last.opening.set()
        borrower = KvPuller([first, last], scene.memory, tasks, Quarantine(scene.returned.put_nowait))
        unknown = KvSource(Endpoint("pigeon", "", 0), "peer:1", RequestKey("r"))
        await borrower.open(unknown).pull([BlockCopy(0, 0)], 5)
        assert (len(first.runs), len(last.runs)) == (0, 1)


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_way_that_failed_is_left_alone_for_some_minutes(
    scene: Scene, is_late: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kv_pull, "EXTRA_WAIT_SECONDS", 0.0)
    now = [0.0]
    async with background_tasks() as tasks:
        first, last = Scripted(failure=TransferFailed("torn")), Scripted("grpc")
        last.opening.set()
        aside = Quarantine(scene.returned.put_nowait)
        borrower = KvPuller([first, last], scene.memory, tasks, aside, lambda: now[0])

        async def pull(lender: KvSource = LENDER) -> None:
            await borrower.open(lender).pull([BlockCopy(0, 0)], 5)

        if not is_late:
            first.opening.set()
        early = [borrower.open(LENDER) for _ in range(2)]
        for borrowing in early:
            with pytest.raises(TimeoutError if is_late else TransferFailed):
                await borrowing.pull([BlockCopy(0, 0)], 0.01)
        assert caplog.text.count("transport=scripted") == 1
        first.opening.set()
        first.failure = None
        await pull()
        assert (len(first.runs), len(last.runs)) == (2, 1)
        restarted = KvSource(Endpoint("scripted", "", 20_000), LENDER.address, LENDER.lease)
        await pull(restarted)
        assert (len(first.runs), len(last.runs)) == (3, 1), "another pool at the same address"
        now[0] += kv_pull.ROUTE_DISABLED_SECONDS
        await pull()
        assert (len(first.runs), len(last.runs)) == (4, 1)


def pick_for(choice: TransportChoice, memory: BlockBytes) -> tuple[Transport, ...]:
    return choose_transports(choice, "127.0.0.1", GrpcTransport(ChannelPool(), memory), memory)


def pick(choice: TransportChoice) -> list[str]:
    memory = HostBlocks(ctypes.addressof(POOL), 4096, 2)
    return [transport.name for transport in pick_for(choice, memory)]


@pytest.fixture
def shared() -> SharedMemory:
    """Yield a pool in a file, like that of a CPU worker."""
    pool = create_shared_memory(8192, "weft-kv-pool")
    assert pool is not None
    return pool


def blocks_of(shared: SharedMemory) -> HostBlocks:
    return HostBlocks(ctypes.addressof(ctypes.c_ubyte.from_buffer(shared.mapping)), 4096, 2, shared.fd)


def unavailable(host: str, protocol: str) -> None:
    raise MooncakeUnavailable("libibverbs.so.1 is missing")


def test_mooncake_goes_first_and_grpc_is_always_there() -> None:
    assert pick(TransportChoice.AUTO) == ["mooncake", "grpc"]
    assert pick(TransportChoice.MOONCAKE) == ["mooncake", "grpc"]


def test_a_pool_in_a_file_is_told_beside_the_way_for_other_machines(shared: SharedMemory) -> None:
    picked = pick_for(TransportChoice.AUTO, blocks_of(shared))
    assert [transport.name for transport in picked] == ["local", "mooncake", "grpc"]
    endpoint = advertised_endpoint(picked)
    assert (endpoint.transport, endpoint.segment) == ("mooncake", picked[1].endpoint().segment)
    # who is on this machine goes by the file, who is not by what its transport says
    assert [transport.reaches(endpoint) for transport in picked] == [True, True, True]
    elsewhere = Endpoint(
        endpoint.transport, endpoint.segment, endpoint.pool_address, "1/fd/3 " + "/memfd:x-" + 32 * "0"
    )
    assert [transport.reaches(elsewhere) for transport in picked] == [False, True, True]


def test_where_open_files_are_not_shown_workers_of_one_machine_are_peers_like_others(
    shared: SharedMemory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(transfer, "OPEN_FILES", tmp_path)
    picked = pick_for(TransportChoice.AUTO, blocks_of(shared))
    assert [transport.name for transport in picked] == ["mooncake", "grpc"]
    assert advertised_endpoint(picked).file == ""


@pytest.mark.parametrize("choice", [TransportChoice.MOONCAKE, TransportChoice.GRPC])
def test_a_transport_that_is_demanded_is_used_on_the_same_machine_too(
    choice: TransportChoice, shared: SharedMemory
) -> None:
    picked = pick_for(choice, blocks_of(shared))
    assert "local" not in [transport.name for transport in picked]
    assert (advertised_endpoint(picked).transport, advertised_endpoint(picked).file) == (choice.value, "")


def test_grpc_alone_when_asked_for() -> None:
    assert pick(TransportChoice.GRPC) == ["grpc"]


def test_without_mooncake_auto_falls_back_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kv_pull, "MooncakeTransport", unavailable)
    with caplog.at_level(logging.WARNING):
        assert pick(TransportChoice.AUTO) == ["grpc"]
    assert "libibverbs" in caplog.text


def test_mooncake_that_is_demanded_and_missing_is_an_error_of_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_pull, "MooncakeTransport", unavailable)
    with pytest.raises(ConfigError, match="WEFT_TRANSPORT"):
        pick(TransportChoice.MOONCAKE)


@pytest.mark.parametrize(
    ("transport", "has_checksums"), [("local", True), ("mooncake", True), ("mooncake_rdma", False), ("grpc", True)]
)
def test_blocks_have_checksums_unless_rdma_carries_them(transport: str, has_checksums: bool) -> None:
    assert needs_checksums(transport) is has_checksums
