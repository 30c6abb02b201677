"""The store client against a real kvstore and Mooncake, working and failing."""

from __future__ import annotations

import asyncio
import ctypes
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.services.kvstore.node import KvStoreProcess, patient_look_ups, until
from tests.weft.worker.pool import BLOCK_BYTES, Worker, content, key, working
from weft import metrics
from weft.asyncio_compat import background_tasks
from weft.kv.block_pool import FullBlock, Tier
from weft.kv.store_client_proxy import StoreLost
from weft.kv.transfer import HostBlocks
from weft.worker import store_client
from weft.worker.store_client import StoreWriter
from weft.worker.store_connection import StoreConnection, StoreConnector, _own_address
from weft.worker.store_reader import PROBE_BLOCKS, SKIPS_BEFORE_PROBE, TROUBLE_CODE, FetchRequest

FETCH_SECONDS = 5.0
CANARY = b"\x5a" * BLOCK_BYTES
PUT_AND_WAIT = """
import asyncio, sys
from tests.weft.worker.pool import Worker, working
from tests.weft.worker.test_store_client import offered

async def main():
    async with working(Worker(sys.argv[1], "outlived")) as worker:
        await offered(worker, list(range(20)))
        print("done", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[KvStoreProcess]:
    """A kvstore that no test breaks; each test has its own model in it."""
    node = KvStoreProcess(is_patient=True)
    node.start()
    yield node
    node.stop()


@pytest.fixture
def patient() -> Iterator[None]:
    """Make lookups wait, however slow the machine is."""
    with patient_look_ups():
        yield


@pytest.fixture
def kvstore() -> Iterator[KvStoreProcess]:
    """A kvstore for tests that break it."""
    node = KvStoreProcess()
    node.start()
    yield node
    node.stop()


def test_a_worker_without_descriptors_left_has_no_store_for_now() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
    try:
        with pytest.raises(StoreLost, match="open files"):
            _own_address("127.0.0.1:7012")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def offered(worker: Worker, numbers: list[int]) -> None:
    """Put blocks and wait until others can find them."""
    worker.offer(numbers)
    await until("all were unpinned", lambda: len(worker.unpinned) >= len(numbers))
    async with asyncio.timeout(FETCH_SECONDS):
        while await found(worker, numbers) < len(numbers):  # noqa: ASYNC110 (another process brings it about)
            await asyncio.sleep(0.01)


async def found(worker: Worker, numbers: list[int]) -> int:
    """Return how many blocks a fetch brings."""
    return (
        await worker.store.fetch(FetchRequest([key(number) for number in numbers], numbers), FETCH_SECONDS)
    ).num_blocks


async def test_more_blocks_than_one_look_up_may_name_are_no_reason_to_leave_the_store_alone(
    shared: KvStoreProcess,
) -> None:
    async with working(Worker(shared.address, "long")) as worker:
        num_keys = 65_537
        wanted = FetchRequest([key(number) for number in range(num_keys)], [0] * num_keys)
        assert (await worker.store.fetch(wanted, FETCH_SECONDS)).num_blocks == 0
        assert worker.store.is_connected


@pytest.mark.usefixtures("patient")
async def test_blocks_of_one_worker_are_fetched_by_another_up_to_the_first_gap(shared: KvStoreProcess) -> None:
    async with working(Worker(shared.address, "gap")) as one, working(Worker(shared.address, "gap")) as other:
        await offered(one, [*range(50)])
        assert sorted(one.unpinned) == [*range(50)]
        wanted = [*range(45), 60, 46]
        targets = [*range(10, 57)]
        for target in targets:
            other.write(target, CANARY)
        fetched = await other.store.fetch(FetchRequest([key(number) for number in wanted], targets), FETCH_SECONDS)
        assert fetched.by_tier == {Tier.DRAM: 45}
        assert 0.0 < fetched.seconds.pop(Tier.DRAM) < FETCH_SECONDS
        assert not fetched.seconds
        assert all(other.read(10 + number) == content(number) for number in range(45))
        assert other.read(55) == other.read(56) == CANARY


@pytest.mark.usefixtures("patient")
async def test_what_is_computed_sooner_is_not_fetched_but_tried_now_and_then(shared: KvStoreProcess) -> None:
    numbers = [*range(20)]
    async with working(Worker(shared.address, "sooner")) as worker:
        await offered(worker, numbers)
        for _ in range(60):
            worker.estimate.on_computed(512, 1e-6)
        counts = [await found(worker, numbers) for _ in range(3 * SKIPS_BEFORE_PROBE)]
        assert [count for count in counts if count] == [PROBE_BLOCKS] * 3
        for _ in range(60):
            worker.estimate.on_computed(512, 10.0)
        assert await found(worker, numbers) == 20


async def test_models_do_not_share(shared: KvStoreProcess) -> None:
    async with working(Worker(shared.address, "mine")) as one, working(Worker(shared.address, "theirs")) as other:
        await offered(one, [0, 1])
        assert await found(other, [0, 1]) == 0


@pytest.mark.usefixtures("patient")
async def test_two_roundings_of_one_block_never_mix(shared: KvStoreProcess) -> None:
    async with working(Worker(shared.address, "rounded")) as one, working(Worker(shared.address, "rounded")) as other:
        await offered(one, [0])
        for repeat in range(3):
            mine = bytes([repeat]) * BLOCK_BYTES
            other.unpinned.clear()
            other.write(1, mine)
            other.store.offer([FullBlock(key(0), 1)])
            await until("it was unpinned", lambda: other.unpinned == [1])
            one.write(0, CANARY)
            assert await found(one, [0]) == 1
            assert one.read(0) in (content(0), mine, bytes([max(0, repeat - 1)]) * BLOCK_BYTES)


@pytest.mark.usefixtures("patient")
async def test_blocks_outlive_the_killed_worker_that_put_them(shared: KvStoreProcess) -> None:
    command = [sys.executable, "-c", PUT_AND_WAIT, shared.address]
    with psutil.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as worker:
        assert await asyncio.to_thread(worker.stdout.readline) == b"done\n"
        agents = worker.children(recursive=True)
        worker.kill()
    await until("its agent is gone, too", lambda: not psutil.wait_procs(agents, timeout=0)[1])
    async with working(Worker(shared.address, "outlived")) as other:
        assert await found(other, [*range(20)]) == 20
        assert all(other.read(number) == content(number) for number in range(20))


async def test_background_work_that_fails_by_a_bug_is_told_when_it_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(_: StoreConnector, _tasks: asyncio.TaskGroup) -> None:
        raise AssertionError("a bug")

    monkeypatch.setattr(StoreConnector, "run", fail)
    monkeypatch.setattr("weft.worker.store_client.CONNECT_SECONDS", 0.01)
    worker = Worker("127.0.0.1:1")
    await worker.store.connect()
    assert "store client failed" in caplog.text
    assert "a bug" in caplog.text
    worker.offer([3])
    assert worker.unpinned == [3]
    with pytest.raises(ExceptionGroup):
        await worker.store.close()


async def test_without_an_address_nothing_is_found_and_offers_are_declined() -> None:
    async with working(Worker("")) as worker:
        worker.offer([3, 4])
        assert worker.unpinned == [3, 4]
        assert await found(worker, [3]) == 0


async def test_more_than_a_share_of_the_pool_is_never_pinned(shared: KvStoreProcess) -> None:
    async with working(Worker(shared.address, "share", num_blocks=128)) as worker:
        worker.offer([*range(128)])
        assert len(worker.unpinned) == 128 - 64
        await until("the rest was unpinned", lambda: sorted(worker.unpinned) == [*range(128)])


async def test_a_full_store_is_no_error() -> None:
    node = KvStoreProcess(segment_bytes=16 << 20)
    await asyncio.to_thread(node.start)
    outcomes = metrics.STORE_BLOCKS
    failed = outcomes.labels("failed")._value.get()
    try:
        async with working(Worker(node.address, num_blocks=512)) as worker:
            for first in range(0, 512, 32):
                worker.offer([*range(first, first + 32)])
                await until("these were unpinned", lambda end=first + 32: len(worker.unpinned) == end)  # type: ignore[misc]
            assert worker.store.is_connected
            assert outcomes.labels("failed")._value.get() == failed
    finally:
        node.stop()


async def test_a_killed_kvstore_costs_nothing_and_is_found_again(kvstore: KvStoreProcess) -> None:
    async with working(Worker(kvstore.address)) as worker:
        await offered(worker, [0, 1])
        children = kvstore.kill()
        assert len(children) == 2
        assert await found(worker, [0, 1]) == 0
        worker.unpinned.clear()
        worker.offer([2])
        await until("it was unpinned", lambda: worker.unpinned == [2])
        assert not psutil.wait_procs(children, timeout=10)[1]
        await asyncio.to_thread(kvstore.start)
        await until("connected again", lambda: worker.store.is_connected)
        assert await found(worker, [0, 1]) == 0
        await offered(worker, [0, 1])


@pytest.mark.parametrize("victim", ["process", "owner", "master"])
async def test_a_frozen_store_is_left_alone_and_never_writes_late(kvstore: KvStoreProcess, victim: str) -> None:
    async with working(Worker(kvstore.address)) as worker:
        await offered(worker, [*range(40)])
        for number in range(40):
            worker.write(number, CANARY)
        frozen: psutil.Process = getattr(kvstore, victim)
        frozen.suspend()
        fetched = await worker.store.fetch(FetchRequest([key(number) for number in range(40)], [*range(40)]), 1.0)
        assert fetched.num_blocks == 0
        assert not worker.store.is_connected
        assert await found(worker, [0]) == 0
        worker.unpinned.clear()
        worker.offer([50])
        await until("it was unpinned", lambda: worker.unpinned == [50])
        if victim == "process":
            frozen.send_signal(signal.SIGCONT)
        await until("connected again", lambda: worker.store.is_connected)
        if frozen.is_running():
            frozen.send_signal(signal.SIGCONT)
        await offered(worker, [51])
        assert all(worker.read(number) == CANARY for number in range(40))


async def cut_off(worker: Worker, kvstore: KvStoreProcess, stall_seconds: float) -> None:
    """Freeze the owner of the memory, and cancel a fetch of 40 blocks that waits for it."""
    await offered(worker, [*range(40)])
    for number in range(40):
        worker.write(number, CANARY)
    kvstore.owner.suspend()
    fetch = asyncio.create_task(
        worker.store.fetch(FetchRequest([key(n) for n in range(40)], [*range(40)]), stall_seconds)
    )
    await asyncio.sleep(0.2)
    fetch.cancel()
    await asyncio.wait({fetch})
    assert fetch.cancelled()


async def test_a_fetch_that_is_cancelled_writes_nothing_afterwards_and_costs_no_connection(
    kvstore: KvStoreProcess,
) -> None:
    async with working(Worker(kvstore.address)) as worker:
        link = worker.store._connector.connection
        await cut_off(worker, kvstore, FETCH_SECONDS)
        second = asyncio.create_task(worker.store.fetch(FetchRequest([key(3)], [60]), FETCH_SECONDS))
        await asyncio.sleep(0.2)
        assert not second.done()
        kvstore.owner.resume()
        # the staging area's, whatever the first read still writes there
        assert (await second).num_blocks == 1
        assert worker.read(60) == content(3)
        assert all(worker.read(number) == CANARY for number in range(40))
        assert worker.store._connector.connection is link


async def test_a_read_that_does_not_end_after_its_fetch_was_cancelled_ends_the_connection(
    kvstore: KvStoreProcess,
) -> None:
    async with working(Worker(kvstore.address)) as worker:
        await cut_off(worker, kvstore, 0.5)
        await until("it was given up", lambda: not worker.store.is_connected)
        kvstore.owner.resume()
        await until("connected again", lambda: worker.store.is_connected)
        assert all(worker.read(number) == CANARY for number in range(40))


def store_process() -> psutil.Process:
    """Return this worker's client process."""
    (found,) = (each for each in psutil.Process().children() if "weft.kv.store_client_process" in each.cmdline())
    return found


def rights_to_the_pool(process: psutil.Process) -> list[str]:
    """Return the rights of each mapping of the pool."""
    maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    return [line.split()[1] for line in maps if "weft-kv-pool" in line]


async def put(worker: Worker, numbers: Sequence[int]) -> None:
    """Put blocks, and wait until that has ended."""
    worker.unpinned.clear()
    worker.offer(numbers)
    await until("all were unpinned", lambda: sorted(worker.unpinned) == sorted(numbers))


async def test_a_put_copies_nothing_and_cannot_write_the_pool(kvstore: KvStoreProcess) -> None:
    async with working(Worker(kvstore.address)) as worker:
        await put(worker, [*range(40)])
        link = worker.store._connector.connection
        assert link is not None
        assert not any(link.client.staging)
        assert rights_to_the_pool(store_process()) == ["r--s"]
        fetched = await worker.store.fetch(FetchRequest([key(n) for n in range(40)], [*range(100, 140)]), 5.0)
        assert fetched.num_blocks == 40
        assert all(worker.read(100 + number) == content(number) for number in range(40))


async def test_blocks_of_a_put_that_hangs_stay_pinned_until_its_process_is_gone(
    kvstore: KvStoreProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_client, "PUT_SECONDS", 0.3)
    async with working(Worker(kvstore.address)) as worker:
        reader, is_there = store_process(), []
        monkeypatch.setattr(worker.store._writer, "_unpin", lambda _: is_there.append(reader.is_running()))
        kvstore.owner.suspend()
        worker.offer([50, 51])
        await until("they were unpinned", lambda: bool(is_there))
        assert is_there == [False]
        kvstore.owner.resume()


async def test_blocks_of_a_put_that_failed_in_transfer_stay_pinned_until_its_process_is_gone() -> None:
    async def put(names: Sequence[str], *_: Any, **__: Any) -> list[int]:
        return [TROUBLE_CODE] * len(names)

    pool, unpinned = (ctypes.c_ubyte * 64)(), list[int]()
    agent: Any = SimpleNamespace(put=put)
    stub: Any = None  # nobody is told of a put that failed
    async with background_tasks() as tasks:
        link = StoreConnection("boot", agent, stub, tasks)
        keeper: Any = SimpleNamespace(connection=link)
        memory = HostBlocks(ctypes.addressof(pool), 8, 8, 0)
        writer = StoreWriter(keeper, memory, b"m" * 16, 4, unpinned.extend)
        tasks.create_task(writer.run())
        writer.offer([FullBlock(key(number), number) for number in (1, 2)])
        async with asyncio.timeout(5):
            while link.is_usable:  # noqa: ASYNC110 (the task beside this one brings it about)
                await asyncio.sleep(0)
            for _ in range(20):
                await asyncio.sleep(0)
            assert unpinned == []
            link.mark_ended()
            while not unpinned:  # noqa: ASYNC110 (the task beside this one brings it about)
                await asyncio.sleep(0)
        assert unpinned == [1, 2]
