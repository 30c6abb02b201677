"""The kvstore as a process: what it answers, and what happens to it when Mooncake does not."""

from __future__ import annotations

import asyncio
import errno
import resource
from collections.abc import AsyncIterator, Iterator

import grpc
import psutil
import pytest

from tests.services.kvstore.node import POLL_SECONDS, KvStoreProcess, until
from weft.errors import ConfigError, InvalidRequest, PeerLost
from weft.kv.block_pool import store_key
from weft.kv.store_client_proxy import StoreClientProxy, StoreLost, StoreSpec
from weft.rpc.client import open_channel, rpc_errors_translated
from weft_mesh.v1 import kvstore_service_pb2 as pb2
from weft_mesh.v1 import kvstore_service_pb2_grpc as pb2_grpc
from weft_services.kvstore import node as node_module
from weft_services.kvstore.config import KvStoreConfig
from weft_services.kvstore.node import NodeStore, StoreAddress

MODEL = b"m" * 16
SIZE = 4096
RPC_SECONDS = 5.0


@pytest.fixture
def kvstore() -> Iterator[KvStoreProcess]:
    node = KvStoreProcess()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 1024), hard))  # what processes begin with
    try:
        node.start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    yield node
    node.stop()


@pytest.fixture
async def channel(kvstore: KvStoreProcess) -> AsyncIterator[grpc.aio.Channel]:
    async with open_channel(kvstore.address) as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> pb2_grpc.KvStoreServiceAsyncStub:
    stub: pb2_grpc.KvStoreServiceAsyncStub = pb2_grpc.KvStoreServiceStub(channel)
    return stub


def test_a_kvstore_may_open_as_many_files_as_the_system_lets_it(kvstore: KvStoreProcess) -> None:
    hard = kvstore.process.rlimit(psutil.RLIMIT_NOFILE)[1]
    assert kvstore.process.rlimit(psutil.RLIMIT_NOFILE) == (hard, hard)


async def describe(stub: pb2_grpc.KvStoreServiceAsyncStub) -> pb2.DescribeResponse:
    with rpc_errors_translated():
        return await stub.Describe(pb2.DescribeRequest(), timeout=RPC_SECONDS)


async def match(stub: pb2_grpc.KvStoreServiceAsyncStub, keys: list[bytes]) -> list[int]:
    with rpc_errors_translated():
        response = await stub.Match(pb2.MatchRequest(fingerprint=MODEL, keys=keys), timeout=RPC_SECONDS)
    return list(response.checksums)


async def publish(stub: pb2_grpc.KvStoreServiceAsyncStub, keys: list[bytes]) -> None:
    blocks = [pb2.StoredBlock(key=key, checksum=number, size_bytes=SIZE) for number, key in enumerate(keys)]
    with rpc_errors_translated():
        await stub.Publish(pb2.PublishRequest(fingerprint=MODEL, blocks=blocks), timeout=RPC_SECONDS)


async def put(store: pb2.DescribeResponse, keys: list[bytes]) -> None:
    """Put blocks of zeros under the names that `publish` will announce."""
    spec = StoreSpec(store.master_address, "127.0.0.1", store.protocol, staging_bytes=SIZE)
    async with StoreClientProxy.running(spec) as agent:
        names = [store_key(MODEL, key, number) for number, key in enumerate(keys)]
        assert await agent.put(names, [0] * len(keys), SIZE) == [0] * len(keys)


async def test_a_match_is_what_was_published_and_still_lies_in_the_store(
    kvstore: KvStoreProcess, stub: pb2_grpc.KvStoreServiceAsyncStub
) -> None:
    store = await describe(stub)
    keys = [bytes([number]) * 32 for number in range(6)]
    await put(store, keys[:4])
    assert await match(stub, keys) == []
    await publish(stub, keys)
    assert await match(stub, keys) == [0, 1, 2, 3]
    assert await match(stub, keys[1:]) == [1, 2, 3]
    assert (await describe(stub)).num_blocks == 4, "blocks that are not in the store are forgotten"
    assert store.segment_bytes == 64 << 20


@pytest.mark.parametrize("victim", ["master", "owner"])
async def test_a_dead_part_is_replaced_and_the_store_starts_empty_under_another_boot_id(
    kvstore: KvStoreProcess, stub: pb2_grpc.KvStoreServiceAsyncStub, victim: str
) -> None:
    before = await describe(stub)
    await put(before, [b"k"])
    await publish(stub, [b"k"])
    victims: psutil.Process = getattr(kvstore, victim)
    victims.kill()
    while await boot_id(stub) in (before.boot_id, None):  # noqa: ASYNC110 (another process brings it about)
        await asyncio.sleep(POLL_SECONDS)
    after = await describe(stub)
    assert after.boot_id != before.boot_id
    assert after.num_blocks == 0
    assert await match(stub, [b"k"]) == []
    await put(after, [b"k"])


async def boot_id(stub: pb2_grpc.KvStoreServiceAsyncStub) -> str | None:
    """None while the store is away."""
    try:
        return (await describe(stub)).boot_id
    except PeerLost:
        return None


async def test_a_killed_service_leaves_no_process_behind(kvstore: KvStoreProcess) -> None:
    children = kvstore.kill()
    assert len(children) == 2
    await until("the kernel has ended them", lambda: not psutil.wait_procs(children, timeout=0)[1])
    await asyncio.to_thread(kvstore.start)


BAD_REQUESTS = {
    "fingerprint": pb2.MatchRequest(fingerprint=b"short", keys=[b"k"]),
    "keys": pb2.MatchRequest(fingerprint=MODEL, keys=[b""]),
    "too long": pb2.MatchRequest(fingerprint=MODEL, keys=[b"k" * 65]),
    "too many": pb2.MatchRequest(fingerprint=MODEL, keys=[b"k"] * 65_537),
}


async def test_what_is_malformed_is_refused(stub: pb2_grpc.KvStoreServiceAsyncStub) -> None:
    for request in BAD_REQUESTS.values():
        with pytest.raises(InvalidRequest), rpc_errors_translated():
            await stub.Match(request, timeout=RPC_SECONDS)
    with pytest.raises(InvalidRequest, match="at most 1024"):
        await publish(stub, [b"k"] * 1025)
    empty = pb2.PublishRequest(fingerprint=MODEL, blocks=[pb2.StoredBlock(key=b"k", checksum=1)])
    with pytest.raises(InvalidRequest, match="must be at least 1"), rpc_errors_translated():
        await stub.Publish(empty, timeout=RPC_SECONDS)


async def test_without_mooncake_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "MASTER_PROGRAM", "mooncake_master_that_is_not_there")
    announced: list[bool] = []

    async def announce(ready: bool) -> None:
        announced.append(ready)

    store = NodeStore(StoreAddress("127.0.0.1", "127.0.0.1", 64 << 20), announce)
    with pytest.raises(StoreLost, match=r"not installed; install it with: pip install 'weft\[mooncake-cpu\]'"):
        await store.run_once()
    with pytest.raises(PeerLost, match="the store is starting"):
        _ = store.running
    assert announced == []


async def test_a_master_that_cannot_be_started_now_is_a_store_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(host: str) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(node_module, "_find_master", lambda: "true")
    monkeypatch.setattr(node_module, "_free_port", full)
    with pytest.raises(StoreLost, match="Too many open files"):
        await node_module.Master.start("127.0.0.1", "127.0.0.1")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"host": "0.0.0.0"}, "WEFT_ADVERTISE_HOST must be set"),
        ({"store_memory_bytes": 1000}, "WEFT_STORE_MEMORY_BYTES=1000"),
    ],
)
def test_settings_that_cannot_work_are_named(settings: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        KvStoreConfig(**settings)  # type: ignore[arg-type]


async def test_a_tenant_over_its_share_of_memory_loses_its_oldest_there_and_nobody_else_loses_anything() -> None:
    node = KvStoreProcess(32 << 20, WEFT_TENANT_SHARE="0.25")
    await asyncio.to_thread(node.start)
    size, other, greedy = 1 << 20, [b"other"], [b"greedy %d" % number for number in range(14)]
    owned = [(other[0], b"small"), *((key, b"greedy") for key in greedy)]
    try:
        async with open_channel(node.address) as channel:
            stub: pb2_grpc.KvStoreServiceAsyncStub = pb2_grpc.KvStoreServiceStub(channel)
            store = await describe(stub)
            spec = StoreSpec(store.master_address, "127.0.0.1", store.protocol, staging_bytes=size)
            async with StoreClientProxy.running(spec) as agent:
                for key, tenant in owned:
                    assert await agent.put([store_key(MODEL, key, 7)], [0], size) == [0]
                    block = pb2.StoredBlock(key=key, checksum=7, size_bytes=size, tenant=tenant)
                    await stub.Publish(pb2.PublishRequest(fingerprint=MODEL, blocks=[block]), timeout=RPC_SECONDS)
                assert (await describe(stub)).used_bytes == 9 * size
                assert await match(stub, other) == [7]
                assert await match(stub, greedy[6:]) == [7] * 8
                assert await match(stub, greedy[5:6]) == []
                gone = [store_key(MODEL, key, 7) for key in greedy[:6]]
                async with asyncio.timeout(2 * RPC_SECONDS):
                    while any(await agent.exist(gone, RPC_SECONDS)):  # noqa: ASYNC110 (another process removes them)
                        # whoever asks keeps them there for half a second
                        await asyncio.sleep(1.5)
    finally:
        node.stop()
