"""A worker's process, the same for either role and for both: boot, listen, join, watch the engine, drain, leave.

boot -> serving -> draining -> gone
 ^                    \\-> parked -> boot
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import grpc

from weft import log, metrics, trace
from weft.asyncio_compat import background
from weft.config import describe
from weft.engine.engine import Engine
from weft.errors import EngineFailed
from weft.grammar import load_grammars
from weft.kv.memory import BlockBytes
from weft.kv.transfer_protocol import LEASE_SECONDS
from weft.kv.transport import Endpoint, Transport
from weft.request import ModelFingerprint, WorkerAddress, WorkerRole
from weft.rpc.client import ChannelPool
from weft.rpc.grpc_transport import GrpcTransport
from weft.rpc.server import RpcServer, until_signal
from weft.stall_clock import AwakeClock
from weft.startup_cache import inherit, keep
from weft.worker.config import StoreFetchPolicy, WorkerConfig
from weft.worker.engine_client import EngineFeed, GrammarDesk
from weft.worker.fetch_cost import AlwaysFetch, FetchEstimate
from weft.worker.fleet_client import Arrival, Introduction, Membership, announced
from weft.worker.health import Health, Vitals
from weft.worker.kv_events import PlaceReporter
from weft.worker.kv_pull import lent_endpoint, needs_checksums, pick_transports
from weft.worker.parking import Parked, give_back, sleep
from weft.worker.pool_memory import PagesAhead, open_blocks
from weft.worker.startup import Booted, boot
from weft.worker.stats_recorder import Tally
from weft.worker.store_client import StoreClient

logger = logging.getLogger(__name__)
WATCH_SECONDS = 0.25
GOODBYE_SECONDS = 0.5
CUT_OFF_SECONDS = 0.2
# what lives when a worker is parked may take so long to its end, or what a signal leaves it if that is more
PARK_GRACE_SECONDS = 60.0
# several times what a transfer takes that nobody answers
CLEAR_SECONDS = 30.0


class Desk(Protocol):
    """What a role keeps of its requests."""

    def close(self) -> None:
        """Take no more."""

    async def until_idle(self) -> None:
        """Every request has ended."""


@dataclass(frozen=True, slots=True)
class Workplace:
    """What a role finds when it is installed. `transports`: the nearest first. `endpoint`: what peers are told of its
    pool. `tasks` outlives every request. `clock`: limits on peers' silence go by it."""

    worker_id: str
    boot_id: str
    engine: Engine
    feed: EngineFeed
    fingerprint: ModelFingerprint
    memory: BlockBytes
    transports: tuple[Transport, ...]
    endpoint: Endpoint
    channels: ChannelPool
    store: StoreClient
    tasks: asyncio.TaskGroup
    with_checksums: bool
    grammars: GrammarDesk = field(default_factory=GrammarDesk)
    lease_seconds: float = LEASE_SECONDS
    tally: Tally = field(default_factory=Tally)
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True)
class Post:
    """A role as a process takes it up: the service it answers, and what puts it to work at a place."""

    role: WorkerRole
    service_name: str
    install: Callable[[Workplace, grpc.aio.Server], Desk]


async def serve_worker(config: WorkerConfig, *posts: Post) -> None:
    """Serve one role, or both and begin with `config.role`, until SIGTERM. Raises when the engine dies, so that the
    process ends and is started again."""
    inherit()
    logger.info(describe(config))
    role = posts[0].role if len(posts) == 1 else config.role
    trace.setup(role, config.worker_id)
    log.mark("imports")
    config = replace(config, role=role, metrics_port=metrics.expose(config.host, config.metrics_port))
    parked = await _live(config, posts)
    while parked is not None:
        give_back()
        if (woken := await sleep(config.scheduler_addr, parked)) is None:
            return
        log.mark(log.ASLEEP)
        parked = await _live(replace(config, role=woken.role), posts, woken.is_draining)


async def _live(config: WorkerConfig, posts: Sequence[Post], is_draining: bool = False) -> Parked | None:
    """From weights and a pool until they are given back, or the process is to end."""
    feed, arrival = EngineFeed(), Arrival(config.worker_id, config.role, config.served_name)
    clock = AwakeClock(on_standstill=metrics.STALLED_SECONDS.inc)
    async with announced(config.scheduler_addr, arrival):
        booted = await boot(config, feed.listener, arrival, clock)
        booted.engine.start()
        arrival.turn_to("joining")
        try:
            async with background() as tasks:
                tasks.create_task(clock.tick())
                return await _serve(config, posts, is_draining, booted, feed, tasks, arrival, clock)
        finally:
            await asyncio.to_thread(booted.engine.stop)
            feed.forget()


async def _serve(
    config: WorkerConfig,
    posts: Sequence[Post],
    is_draining: bool,
    booted: Booted,
    feed: EngineFeed,
    tasks: asyncio.TaskGroup,
    arrival: Arrival,
    clock: AwakeClock,
) -> Parked | None:
    rpc = RpcServer([post.service_name for post in posts])
    place = replace(await _furnish(config, booted, feed, tasks), clock=clock)
    log.mark("transport and store")
    desks = [post.install(place, rpc.server) for post in posts]
    address = await rpc.start(config.host, config.port)
    engine = place.engine
    vitals = Vitals(engine.watchdog, lambda: engine.load, booted.engine_config.num_blocks, clock)
    health = Health(vitals, rpc)
    membership = Membership(
        config.scheduler_addr,
        replace(_introduction(config, posts, place, booted, address), is_draining=is_draining),
        lambda: engine.load,
        lambda: engine.is_alive and health.is_fit,
        lambda: replace(place.tally.read(), work=feed.work),
    )
    keeping = tasks.create_task(membership.keep())
    try:
        watches = _arrive(config, membership, health, arrival), _watch(engine, health), feed.until_broken()
        drain = partial(_drain, desks=desks, membership=membership, rpc=rpc)
        return await _until_drained(config, membership, drain, watches)
    finally:
        keeping.cancel()
        await rpc.stop(CUT_OFF_SECONDS)
        await _clear(place)


async def _furnish(config: WorkerConfig, booted: Booted, feed: EngineFeed, tasks: asyncio.TaskGroup) -> Workplace:
    engine = booted.engine
    memory = open_blocks(engine.pool_memory, booted.device)
    channels = ChannelPool()
    fallback = GrpcTransport(channels, memory)
    transports = pick_transports(config.transport, config.peer_host, config.mooncake_protocol, fallback, memory)
    endpoint = lent_endpoint(transports)
    choose = AlwaysFetch if config.store_fetch_policy is StoreFetchPolicy.ALWAYS else FetchEstimate
    estimate = choose(booted.engine_config.block_tokens, booted.engine_config.chunk_tokens)
    feed.on_computed = estimate.computed
    store = StoreClient(config.kvstore_addr, memory, booted.fingerprint, engine.unpin, estimate)
    await store.connect()
    feed.subscribe(lambda output: store.offer(output.sealed))
    boot_id = uuid.uuid4().hex
    places = PlaceReporter(config.kvstore_addr, config.worker_id, boot_id, booted.fingerprint)
    feed.subscribe(lambda output: places.changed(output.cache_changes))
    tasks.create_task(places.run())
    tasks.create_task(PagesAhead(memory, lambda: engine.load).run())
    return Workplace(
        worker_id=config.worker_id,
        boot_id=boot_id,
        engine=engine,
        feed=feed,
        fingerprint=booted.fingerprint,
        memory=memory,
        transports=transports,
        endpoint=endpoint,
        channels=channels,
        store=store,
        tasks=tasks,
        with_checksums=needs_checksums(endpoint.transport),
        grammars=_grammars(config, booted),
        lease_seconds=config.lease_seconds,
    )


def _grammars(config: WorkerConfig, booted: Booted) -> GrammarDesk:
    if config.model is None:
        return GrammarDesk()
    limits = booted.engine_config
    return GrammarDesk(partial(load_grammars, config.model, limits.vocab_size, limits.eos_token_ids))


def _introduction(
    config: WorkerConfig, posts: Sequence[Post], place: Workplace, booted: Booted, bound: str
) -> Introduction:
    address = config.peer_address(bound.rpartition(":")[2])
    metrics_address = config.peer_address(config.metrics_port)
    logger.info("listening at=%s metrics=%s boot=%s", address, metrics_address, place.boot_id)
    return Introduction(
        worker=WorkerAddress(place.worker_id, place.boot_id, address),
        role=config.role,
        model=config.served_name,
        fingerprint=place.fingerprint,
        num_blocks=booted.engine_config.num_blocks,
        max_context_tokens=booted.engine_config.context_tokens,
        transport=place.endpoint.transport,
        metrics_address=metrics_address,
        can_change_role=len(posts) > 1,
    )


async def _arrive(config: WorkerConfig, membership: Membership, health: Health, arrival: Arrival) -> None:
    """Join; then, off the way of a start, have what it read at hand for the next one."""
    await membership.until_joined()
    arrival.is_over = True
    log.mark(log.JOINING)
    await health.join()
    about = {str(config.model / name) for name in ("config.json", "generation_config.json")} if config.model else set()
    if (num_bytes := await asyncio.to_thread(keep, about)) > 0:
        logger.info("kept in memory for the next start: %d MiB of libraries and modules", num_bytes >> 20)


async def _until_drained(
    config: WorkerConfig,
    membership: Membership,
    drain: Callable[[float], Awaitable[None]],
    watches: Sequence[Coroutine[Any, Any, None]],
) -> Parked | None:
    """Work on until a signal, or the scheduler's wish to park; what lives has come to its end then."""
    is_ending = await until_signal(*watches, or_when=membership.until_park_changes)
    if not is_ending:
        # a signal meanwhile counts for more than the wish to park
        grace = max(PARK_GRACE_SECONDS, config.grace_seconds)
        is_ending = await until_signal(or_when=partial(drain, grace))
    if is_ending:
        await drain(config.grace_seconds)
        return None
    return Parked(membership.introduction, membership.is_parked)


async def _watch(engine: Engine, health: Health) -> None:
    while engine.is_alive:  # a thread that dies or hangs tells nobody
        await health.check()
        await asyncio.sleep(WATCH_SECONDS)
    raise EngineFailed("the engine's thread has ended")


async def _drain(grace_seconds: float, desks: Sequence[Desk], membership: Membership, rpc: RpcServer) -> None:
    """Say goodbye, then let what lives come to its end, for so long."""
    await rpc.set_ready(False)
    for desk in desks:
        desk.close()
    await membership.leave(GOODBYE_SECONDS)
    try:
        async with asyncio.timeout(grace_seconds):
            for desk in desks:
                await desk.until_idle()
    except TimeoutError:
        logger.warning("requests are cut off: the grace of %g s is over", grace_seconds)


async def _clear(place: Workplace) -> None:
    """Give everything back. What a library does not let go of goes with the process; its keeper starts another."""
    try:
        async with asyncio.timeout(CLEAR_SECONDS):
            place.grammars.close()
            await place.store.close()
            for transport in place.transports:
                await transport.close()
            await place.channels.close()
    except TimeoutError:
        logger.error("transfers have not ended after %g s; this process ends without them", CLEAR_SECONDS)
        os._exit(1)
