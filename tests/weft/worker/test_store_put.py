"""Puts read the pool itself, may not write it, and hold its blocks for as long as anybody may read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from tests.services.kvstore.node import KvStoreProcess, until
from tests.weft.worker.pool import Worker, content, key, working
from weft.worker import store_put
from weft.worker.store_get import Wanted


@pytest.fixture
def kvstore() -> Iterator[KvStoreProcess]:
    node = KvStoreProcess()
    node.start()
    yield node
    node.stop()


def store_process() -> psutil.Process:
    """This worker's."""
    (found,) = (each for each in psutil.Process().children() if "weft.kv.store_process" in each.cmdline())
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
        link = worker.store._keeper.link
        assert link is not None
        assert not any(link.agent.staging)
        assert rights_to_the_pool(store_process()) == ["r--s"]
        fetched = await worker.store.fetch(Wanted([key(n) for n in range(40)], [*range(100, 140)]), 5.0)
        assert fetched.num_blocks == 40
        assert all(worker.read(100 + number) == content(number) for number in range(40))


async def test_blocks_of_a_put_that_hangs_stay_pinned_until_its_process_is_gone(
    kvstore: KvStoreProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_put, "PUT_SECONDS", 0.3)
    async with working(Worker(kvstore.address)) as worker:
        reader, is_there = store_process(), []
        monkeypatch.setattr(worker.store._writer, "_unpin", lambda _: is_there.append(reader.is_running()))
        kvstore.owner.suspend()
        worker.offer([50, 51])
        await until("they were unpinned", lambda: bool(is_there))
        assert is_there == [False]
        kvstore.owner.resume()
