"""The store process: what waits for what. The library is a stand-in whose puts are held by a file."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from weft.kv import store_client_proxy
from weft.kv.store_client_proxy import StoreBusy, StoreClientProxy, StoreLost, StoreSpec

SECONDS = 20.0
SIZE = 4096
LIBRARY = """
import ctypes, os, time

class MooncakeDistributedStore:
    def setup(self, *arguments): return 0
    def register_buffer(self, address, size): return 0
    def batch_is_exist(self, keys):
        while keys == ["slow"] and os.path.exists(os.environ["HELD"]): time.sleep(0.01)
        return [1] * len(keys)
    def batch_remove(self, keys): raise ValueError("a bug")
    def batch_put_from(self, keys, addresses, sizes):
        open(os.environ["HELD"] + ".begun", "w").close()
        while os.path.exists(os.environ["HELD"]): time.sleep(0.01)
        return [0] * len(keys)
    def batch_get_into(self, keys, addresses, sizes):
        for key, address, size in zip(keys, addresses, sizes):
            ctypes.memset(address, int(key), size)
        return sizes
"""


@pytest.fixture
async def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file; while it exists, no put ends."""
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "store.py").write_text(LIBRARY)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("HELD", str(tmp_path / "held"))
    (tmp_path / "held").touch()
    return tmp_path / "held"


@pytest.fixture
async def agent(held: Path) -> AsyncIterator[StoreClientProxy]:
    async with StoreClientProxy.running(StoreSpec("nowhere:1", "127.0.0.1", "tcp", staging_bytes=4 * SIZE)) as agent:
        yield agent


def has_begun(held: Path) -> bool:
    return held.with_suffix(".begun").exists()


def let_go(held: Path) -> None:
    held.unlink()


async def test_a_put_that_takes_long_holds_up_neither_look_ups_nor_reads(agent: StoreClientProxy, held: Path) -> None:
    async with asyncio.timeout(SECONDS):
        puts = [asyncio.create_task(agent.put([name], [0], SIZE)) for name in ("a", "b")]
        while not has_begun(held):  # noqa: ASYNC110 (another process brings it about)
            await asyncio.sleep(0.01)
        assert await agent.exist(["x", "y"], SECONDS) == [True, True]
        assert await agent.get(["7", "8"], [SIZE, 2 * SIZE], SIZE) == [SIZE, SIZE]
        assert bytes(agent.staging[SIZE : 3 * SIZE]) == b"\7" * SIZE + b"\10" * SIZE
        assert not any(put.done() for put in puts)
        let_go(held)
        assert [await put for put in puts] == [[0], [0]]


async def test_a_probe_does_not_wait_in_the_line_of_look_ups(
    agent: StoreClientProxy, held: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_client_proxy, "MAX_PENDING", 1)
    async with asyncio.timeout(SECONDS):
        look_up = asyncio.create_task(agent.exist(["slow"], SECONDS))
        await asyncio.sleep(0)
        with pytest.raises(StoreBusy):
            await agent.exist(["x"], SECONDS)
        await agent.probe(SECONDS)
        assert not look_up.done()
        let_go(held)
        assert await look_up == [True]


async def test_a_call_that_fails_by_a_bug_ends_all_that_wait(agent: StoreClientProxy) -> None:
    put = asyncio.create_task(agent.put(["a"], [0], SIZE))
    await asyncio.sleep(0)
    with pytest.raises(StoreLost, match="a bug"):
        await agent.remove(["a"])
    with pytest.raises(StoreLost, match="a bug"):
        await put
    assert not agent.is_running
