"""Puts read the pool itself, may not write it, and hold its blocks for as long as anybody may read them."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.services.kvstore.node import KvStoreProcess, until
from tests.weft.worker.pool import Worker, content, key, working
from weft.asyncio_compat import background_tasks
from weft.kv.memory import HostBlocks
from weft.kv.offload_queue import FullBlock
from weft.worker import store_writer
from weft.worker.store_connection import StoreConnection
from weft.worker.store_reader import TROUBLE_CODE, FetchRequest
from weft.worker.store_writer import StoreWriter


@pytest.fixture
def kvstore() -> Iterator[KvStoreProcess]:
    node = KvStoreProcess()
    node.start()
    yield node
    node.stop()


def store_process() -> psutil.Process:
    """This worker's."""
    (found,) = (each for each in psutil.Process().children() if "weft.kv.store_client_process" in each.cmdline())
    return found


def rights_to_the_pool(process: psutil.Process) -> list[str]:
    """Of each of its mappings."""
    maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    return [line.split()[1] for line in maps if "weft-kv-pool" in line]


async def put(worker: Worker, numbers: Sequence[int]) -> None:
    """And wait until that has ended."""
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
    monkeypatch.setattr(store_writer, "PUT_SECONDS", 0.3)
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
