"""Prefill and decode workers in the test's own loop: real servicers, engines and transports, a tiny random model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tests.services.attach import GREEDY, Gateway
from tests.weft.engine.steady_head import SteadyHead
from tests.weft.engine.tiny_heads import HeadedTiny, MakeHead
from tests.weft.tiny_llama import Tiny
from weft.asyncio_compat import background_tasks
from weft.engine.config import EngineConfig
from weft.engine.drafting.drafter import Speculator
from weft.engine.engine import Engine
from weft.engine.messages import EngineLoad, StepOutput
from weft.engine.runner import assemble
from weft.kv.mooncake import MooncakeTransport
from weft.kv.transfer import CopyRange, Endpoint, HostBlocks, KvSource, LocalTransport, Transport
from weft.model.decoder import Decoder
from weft.model.kv_layout import block_bytes, draft_group, kv_groups, layout_name
from weft.request import ModelFingerprint, WorkerAddress
from weft.rpc.client import ChannelPool
from weft.rpc.grpc_transport import GrpcTransport
from weft.rpc.server import RpcServer
from weft.worker.config import LEASE_SECONDS
from weft.worker.engine_client import EngineClient, EngineEvents
from weft.worker.kv_pull import advertised_endpoint
from weft.worker.process import WorkerContext
from weft.worker.store_client import StoreClient
from weft.worker.store_reader import AlwaysFetch
from weft_services.decode.service import install as install_decode
from weft_services.prefill.service import install as install_prefill

BLOCK_TOKENS = 4
CHUNK_TOKENS = 8


class Meddler:
    """A real transport, with something happening before or after every pull."""

    inner: Transport

    def __init__(self) -> None:
        self.num_pulls = 0
        self.runs: list[CopyRange] = []

    @property
    def name(self) -> str:
        return self.inner.name

    def register(self, address: int, size_bytes: int) -> None:
        raise AssertionError("the inner one is registered")

    def endpoint(self) -> Endpoint:
        return self.inner.endpoint()

    def reaches(self, peer: Endpoint) -> bool:
        return self.inner.reaches(peer)

    async def connect(self, peer: Endpoint) -> None:
        await self.inner.connect(peer)

    async def pull(self, lender: KvSource, runs: Sequence[CopyRange], timeout_seconds: float) -> None:
        self.num_pulls += 1
        self.runs += runs
        await self.before()
        await self.inner.pull(lender, runs, timeout_seconds)
        await self.after(runs)

    async def before(self) -> None:
        """Nothing."""

    async def after(self, runs: Sequence[CopyRange]) -> None:
        """Nothing."""

    async def close(self) -> None:
        await self.inner.close()


@dataclass
class Worker:
    """A listening worker and its insides."""

    place: WorkerContext
    client: EngineClient[Any]
    address: WorkerAddress
    rpc: RpcServer

    @property
    def engine(self) -> Engine:
        """The real one."""
        return self.place.engine

    @property
    def load(self) -> EngineLoad:
        """As last seen by the loop."""
        return self.place.events.load

    async def until_load(self, is_so: Any) -> EngineLoad:
        """Wait for a step after which the load is as asked for."""
        seen = asyncio.Event()

        def look(output: StepOutput) -> None:
            if is_so(output.load):
                seen.set()

        self.place.events.subscribe(look)
        if is_so(self.load):
            return self.load
        # an idle engine says nothing; an empty command makes it speak
        self.engine.unpin(())
        async with asyncio.timeout(20):
            await seen.wait()
        return self.load

    async def until_idle(self) -> None:
        """Every block is free or cached, and nothing runs."""
        await self.until_load(
            lambda load: not (load.active_blocks or load.quarantined_blocks or load.num_running or load.num_waiting)
        )


def fingerprint_of(tiny: Tiny) -> ModelFingerprint:
    """What workers of this model compare."""
    size = block_bytes(tiny.config, "float32", BLOCK_TOKENS)
    return ModelFingerprint("cafe", "float32", BLOCK_TOKENS, size, layout_name(tiny.config))


class Drafting(NamedTuple):
    """What makes the draft model of a `tiny` with a draft layer, and what chooses the drafts of an engine."""

    make_head: MakeHead
    speculator: Speculator | None = None


def _engine(tiny: Tiny, feed: EngineEvents, num_blocks: int, pins: bool, drafting: Drafting | None) -> Engine:
    config = EngineConfig(
        *(num_blocks, BLOCK_TOKENS, tiny.config.vocab_size, 200, CHUNK_TOKENS),
        pin_sealed=pins,
        spans=kv_groups(tiny.config).spans,
        draft_group=draft_group(tiny.config),
    )
    model = Decoder(tiny.config, tiny.weights, torch.float32, torch.device("cpu"))
    if isinstance(tiny, HeadedTiny):
        drafting = drafting or Drafting(tiny.make_head, SteadyHead())
    if drafting is None:
        return assemble(model, "float32", config, feed.listener)
    head = drafting.make_head(model)
    return assemble(model, "float32", config, feed.listener, speculator=drafting.speculator, head=head)


def _transports(kind: str, channels: ChannelPool, memory: HostBlocks) -> list[Transport]:
    """The one that is asked for first; gRPC is always there."""
    first: list[Transport] = []
    if kind == "mooncake":
        first.append(MooncakeTransport("127.0.0.1"))
    if kind == "local":
        first.append(LocalTransport(memory))
    return [*first, GrpcTransport(channels, memory)]


@asynccontextmanager
async def start_worker(
    tiny: Tiny,
    name: str,
    install: Any,
    transport: str = "grpc",
    num_blocks: int = 64,
    store: Any = None,
    meddler: Meddler | None = None,
    lease_seconds: float = LEASE_SECONDS,
    boot_id: str = "",
    port: int = 0,
    kvstore_addr: str = "",
    fingerprint: ModelFingerprint | None = None,
    drafting: Drafting | None = None,
) -> AsyncIterator[Worker]:
    """A worker on a port of its own, or on that one; `store` instead of a client of that kvstore."""
    feed = EngineEvents()
    engine = _engine(tiny, feed, num_blocks, pins=bool(kvstore_addr), drafting=drafting)
    pool = engine.pool_memory
    memory = HostBlocks(pool.address, pool.block_bytes, pool.num_blocks, pool.shared_fd, pool.units)
    channels = ChannelPool()
    transports = _transports(transport, channels, memory)
    for each in transports:
        each.register(pool.address, pool.block_bytes * pool.num_blocks)
    endpoint = advertised_endpoint(transports)
    if meddler is not None:
        meddler.inner = transports[0]
        transports[0] = meddler
    estimate = AlwaysFetch(BLOCK_TOKENS, CHUNK_TOKENS)
    fingerprint = fingerprint or fingerprint_of(tiny)
    store_client = StoreClient(kvstore_addr, memory, fingerprint, engine.unpin, estimate)
    feed.on_sealed = store_client.offer
    rpc = RpcServer([])
    engine.start()
    try:
        await store_client.connect()
        async with background_tasks() as tasks:
            place = WorkerContext(
                worker_id=name,
                boot_id=boot_id or f"boot-of-{name}",
                engine=engine,
                events=feed,
                fingerprint=fingerprint,
                memory=memory,
                transports=tuple(transports),
                endpoint=endpoint,
                channels=channels,
                store=store or store_client,
                tasks=tasks,
                with_checksums=True,
                lease_seconds=lease_seconds,
            )
            client = install(place, rpc.server)
            address = await rpc.start("127.0.0.1", port)
            try:
                yield Worker(place, client, WorkerAddress(name, place.boot_id, address), rpc)
            finally:
                await rpc.stop(0)
                for each in transports:
                    await each.close()
                await channels.close()
    finally:
        await store_client.close()
        await asyncio.to_thread(engine.stop)


@dataclass
class Pair:
    """One prefill worker, one decode worker, one gateway."""

    tiny: Tiny
    prefill: Worker
    decode: Worker
    gateway: Gateway

    def expected(self, token_ids: Sequence[int], num_tokens: int = GREEDY.max_tokens) -> list[int]:
        """What transformers says."""
        return self.tiny.greedy(list(token_ids), num_tokens)

    async def until_idle(self) -> None:
        """No block is held on either side."""
        await self.prefill.until_idle()
        await self.decode.until_idle()


@asynccontextmanager
async def start_pair(
    tiny: Tiny,
    transport: str = "grpc",
    meddler: Meddler | None = None,
    store: Any = None,
    num_blocks: int = 64,
    prefill_blocks: int = 64,
    lease_seconds: float = LEASE_SECONDS,
    kvstore_addr: str = "",
    fingerprint: ModelFingerprint | None = None,
    drafting: Drafting | None = None,
) -> AsyncIterator[Pair]:
    """Start both workers. `meddler` and `num_blocks` are decode's; store, kvstore and `fingerprint` prefill's.

    The speculator of `drafting` is decode's, the draft model that of both.
    """
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(
            start_worker(
                *(tiny, "prefill-0", install_prefill, transport, prefill_blocks, store),
                lease_seconds=lease_seconds,
                kvstore_addr=kvstore_addr,
                fingerprint=fingerprint,
                drafting=drafting and Drafting(drafting.make_head),
            )
        )
        decode = await stack.enter_async_context(
            start_worker(
                *(tiny, "decode-0", install_decode, transport, num_blocks),
                meddler=meddler,
                lease_seconds=lease_seconds,
                drafting=drafting,
            )
        )
        tasks = await stack.enter_async_context(background_tasks())
        gateway = Gateway(decode.address, tasks)
        yield Pair(tiny, prefill, decode, gateway)
        await gateway.leave()
