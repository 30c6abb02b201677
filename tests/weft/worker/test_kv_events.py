"""What a worker reports of its pool, heard by a real index behind a real rpc."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.weft.worker.pool import key
from weft.kv.block_pool import BlockPool, fingerprint_digest
from weft.request import ModelFingerprint
from weft.rpc.client import open_channel
from weft.rpc.server import RpcServer
from weft.worker import kv_events as places_module
from weft.worker.kv_events import KvEventPublisher
from weft_mesh.v1 import kvstore_service_pb2 as pb2
from weft_mesh.v1 import kvstore_service_pb2_grpc as pb2_grpc
from weft_services.kvstore.block_index import PoolIndex
from weft_services.kvstore.node import NodeStore, StoreAddress
from weft_services.kvstore.service import SERVICE_NAME, KvStoreServicer

FINGERPRINT = ModelFingerprint("weights", "float32", 16, 4096, "layout")
DIGEST = fingerprint_digest(FINGERPRINT)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places_module, "INTERVAL_SECONDS", 0.01)


async def _announce(ready: bool) -> None:
    """Nobody listens."""


@asynccontextmanager
async def serving(places: PoolIndex, port: int = 0) -> AsyncIterator[str]:
    """Run a kvstore without Mooncake; its index answers all the same."""
    rpc = RpcServer([SERVICE_NAME])
    store = NodeStore(StoreAddress("127.0.0.1", "127.0.0.1", 64 << 20), _announce)
    pb2_grpc.add_KvStoreServiceServicer_to_server(KvStoreServicer(store, places), rpc.server)
    yield await rpc.start("127.0.0.1", port)
    await rpc.stop(0)


@asynccontextmanager
async def reporting(reporter: KvEventPublisher) -> AsyncIterator[KvEventPublisher]:
    task = asyncio.create_task(reporter.run())
    yield reporter
    task.cancel()
    await asyncio.wait({task})


async def until_located(address: str, numbers: list[int], count: int) -> None:
    async with open_channel(address) as channel:
        stub: pb2_grpc.KvStoreServiceAsyncStub = pb2_grpc.KvStoreServiceStub(channel)
        request = pb2.LocateRequest(fingerprint=DIGEST, keys=[key(number) for number in numbers])
        async with asyncio.timeout(20):
            while True:
                response = await stub.Locate(request, timeout=5, wait_for_ready=True)
                if sum(match.num_blocks for match in response.workers) == count:
                    return
                await asyncio.sleep(0.01)


async def test_the_index_follows_a_pool_through_publishing_and_eviction() -> None:
    pool = BlockPool(8)
    async with (
        serving(PoolIndex()) as address,
        reporting(KvEventPublisher(address, "prefill-0", "boot", FINGERPRINT)) as reporter,
    ):
        blocks = pool.reserve(8)
        for number, block in enumerate(blocks):
            pool.publish(block, key(number))
        reporter.on_changes(pool.take_changes())
        await until_located(address, [*range(8)], 8)
        pool.release(blocks)
        pool.reserve(3)  # the end of the prefix goes first
        reporter.on_changes(pool.take_changes())
        await until_located(address, [*range(8)], 5)


async def test_a_kvstore_that_was_started_anew_hears_everything_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places_module, "MAX_KEYS", 7)
    numbers = [*range(50)]
    async with serving(PoolIndex()) as address:
        reporter = KvEventPublisher(address, "prefill-0", "boot", FINGERPRINT)
        reporter.on_changes({key(number): True for number in numbers})
        async with reporting(reporter):
            await until_located(address, numbers, 50)
    port = int(address.rpartition(":")[2])
    async with reporting(reporter), serving(PoolIndex(), port) as address:
        reporter.on_changes({key(50): True})
        await until_located(address, [*numbers, 50], 51)


async def test_after_a_lost_report_the_index_is_told_everything_again() -> None:
    async with (
        serving(PoolIndex()) as address,
        reporting(KvEventPublisher(address, "a", "boot", FINGERPRINT)) as reporter,
    ):
        reporter.on_changes({key(number): True for number in range(5)})
        await until_located(address, [*range(5)], 5)
        reporter._sequence += 1
        reporter.on_changes({key(5): True})
        await until_located(address, [*range(6)], 6)


async def test_without_a_kvstore_nothing_is_kept() -> None:
    reporter = KvEventPublisher("", "a", "boot", FINGERPRINT)
    reporter.on_changes({key(1): True})
    await asyncio.wait_for(reporter.run(), 1)
    assert not reporter._held
