"""Process of a worker with one role or both: load, listen, join, watch the engine, drain, sleep, leave.

boot -> serving -> draining -> gone
 ^                    \\-> asleep -> boot
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import grpc
import torch

from weft import log, metrics, trace
from weft.asyncio_compat import background_tasks
from weft.config import read_config
from weft.engine.engine import Engine, StepWatchdog
from weft.engine.messages import EngineLoad
from weft.errors import EngineFailed
from weft.fleet_types import WorkerHello
from weft.grammar import load_grammars
from weft.kv.transfer import BlockBytes, Endpoint, Transport
from weft.options import StoreFetchPolicy
from weft.request import ModelFingerprint, WorkerAddress, WorkerRole
from weft.rpc.client import ChannelPool
from weft.rpc.grpc_transport import GrpcTransport
from weft.rpc.server import RpcServer, run, until_signal
from weft.stall_clock import StallAwareClock
from weft.weights.object_store import with_local_model
from weft.worker import draft_metrics
from weft.worker.config import LEASE_SECONDS, WorkerConfig
from weft.worker.engine_client import EngineClient, EngineEvents, GrammarCompiler, StatsRecorder
from weft.worker.fleet_client import LoadProgress, Membership, reporting_progress
from weft.worker.kv_events import KvEventPublisher
from weft.worker.kv_pull import advertised_endpoint, choose_transports, needs_checksums
from weft.worker.pool_memory import PoolPrefaulter, open_blocks
from weft.worker.startup import LoadedEngine, load_engine
from weft.worker.store_client import StoreClient
from weft.worker.store_reader import AlwaysFetch, FetchCostModel
from weft_kernels.sampling import SAMPLING_VERSION

logger = logging.getLogger(__name__)
# A full pool means a busy worker. A pool that stays full without a new token has lost its blocks.
EXHAUSTED_SECONDS = 30.0
# An engine that hangs this long never recovers; the process ends and is restarted.
LOST_SECONDS = 600.0
WATCH_SECONDS = 0.25
LEAVE_SECONDS = 0.5
CUT_OFF_SECONDS = 0.2
# Grace period for requests before a worker sleeps; WEFT_GRACE_SECONDS if that is longer.
SLEEP_GRACE_SECONDS = 60.0
RELEASE_AGAIN_SECONDS = 1.0, 4.0, 15.0  # after falling asleep, one after the other
# Several times the duration of a transfer that gets no answer.
RELEASE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """Everything a role needs at installation.

    - `transports`: in order of preference.
    - `endpoint`: describes our pool to peers.
    - `tasks`: outlives every request.
    - `clock`: measures the silence of peers.
    """

    worker_id: str
    boot_id: str
    engine: Engine
    events: EngineEvents
    fingerprint: ModelFingerprint
    memory: BlockBytes
    transports: tuple[Transport, ...]
    endpoint: Endpoint
    channels: ChannelPool
    store: StoreClient
    tasks: asyncio.TaskGroup
    with_checksums: bool
    grammars: GrammarCompiler = field(default_factory=GrammarCompiler)
    lease_seconds: float = LEASE_SECONDS
    stats: StatsRecorder = field(default_factory=StatsRecorder)
    clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True, slots=True)
class RoleService:
    """A role of a process: its gRPC service, and the function that installs it."""

    role: WorkerRole
    service_name: str
    install: Callable[[WorkerContext, grpc.aio.Server], EngineClient[Any]]


def run_worker(name: str, *roles: RoleService) -> None:
    """Read the settings, then serve these roles until SIGTERM. `name` marks log lines until the settings are read."""

    async def main() -> None:
        config = read_config(WorkerConfig, with_local_model())
        log.setup(config.worker_id)
        await serve_worker(config, *roles)

    gc.freeze()  # Scanning the imported modules would stop the engine for 0.1 s each time.
    log.setup(name)
    run(main)


async def serve_worker(config: WorkerConfig, *roles: RoleService) -> None:
    """Serve one role, or both starting with `config.role`, until SIGTERM.

    Raises when the engine dies, so that the process ends and is restarted.
    """
    logger.info("%s", config)
    role = roles[0].role if len(roles) == 1 else config.role
    trace.setup(role, config.worker_id)
    log.startup_phase("imports")
    port = metrics.expose(config.host, config.metrics_port)
    config = config.model_copy(update={"role": role, "metrics_port": port})
    sleeping = await _run_until_asleep(config, roles)
    while sleeping is not None:
        release_memory()
        if (woken := await sleep_until_woken(config.scheduler_addr, sleeping)) is None:
            return
        log.startup_phase(log.SLEEPING)
        sleeping = await _run_until_asleep(config.model_copy(update={"role": woken.role}), roles, woken.is_draining)


async def _run_until_asleep(
    config: WorkerConfig, roles: Sequence[RoleService], is_draining: bool = False
) -> SleepState | None:
    """Load weights and pool, and serve until they are released. None means that the process must end."""
    events, progress = EngineEvents(), LoadProgress(config.worker_id, config.role, config.served_name)
    clock = StallAwareClock(on_standstill=metrics.STALLED_SECONDS.inc)
    async with reporting_progress(config.scheduler_addr, progress):
        loaded = await load_engine(config, events.listener, progress, clock)
        loaded.engine.start()
        progress.set_phase("joining")
        lost = _group_loss(loaded)
        try:
            speculator = loaded.speculator
            with draft_metrics.exposed(speculator.stats if speculator else None):
                async with background_tasks() as tasks:
                    tasks.create_task(clock.tick())
                    tasks.create_task(draft_metrics.watch_head())
                    return await _serve(config, roles, is_draining, loaded, events, tasks, progress, clock, lost)
        finally:
            await asyncio.to_thread(loaded.engine.stop)
            if loaded.group is not None:
                await asyncio.to_thread(loaded.group.close)
            events.clear()


async def _serve(
    config: WorkerConfig,
    roles: Sequence[RoleService],
    is_draining: bool,
    loaded: LoadedEngine,
    events: EngineEvents,
    tasks: asyncio.TaskGroup,
    progress: LoadProgress,
    clock: StallAwareClock,
    lost: asyncio.Future[None],
) -> SleepState | None:
    rpc = RpcServer([role_service.service_name for role_service in roles])
    context = replace(await _build_context(config, loaded, events, tasks), clock=clock)
    log.startup_phase("transport and store")
    clients = [role_service.install(context, rpc.server) for role_service in roles]
    address = await rpc.start(config.host, config.port)
    engine = context.engine
    engine_health = EngineHealth(engine.watchdog, lambda: engine.load, loaded.engine_config.num_blocks, clock)
    health = WorkerHealth(engine_health, rpc)
    membership = Membership(
        config.scheduler_addr,
        replace(_hello(config, roles, context, loaded, address), is_draining=is_draining),
        lambda: engine.load,
        lambda: engine.is_alive and health.is_healthy,
        lambda: replace(context.stats.read(), engine_time=events.engine_time),
    )
    keeping = tasks.create_task(membership.run())
    try:
        watches = (
            _join_fleet(membership, health, progress),
            _watch_engine(engine, health),
            events.until_broken(),
            _until_lost(lost),
        )
        drain = partial(_drain, clients=clients, membership=membership, rpc=rpc)
        return await _serve_until_drained(config, membership, drain, watches)
    finally:
        keeping.cancel()
        await rpc.stop(CUT_OFF_SECONDS)
        await _release(context)


def _group_loss(loaded: LoadedEngine) -> asyncio.Future[None]:
    """Return a future that fails when a rank of the engine's group is lost."""
    loop = asyncio.get_running_loop()
    lost: asyncio.Future[None] = loop.create_future()
    lost.add_done_callback(lambda done: done.cancelled() or done.exception())

    def fail(reason: str) -> None:
        if not lost.done():
            lost.set_exception(EngineFailed(f"the group is lost: {reason}"))

    metrics.GROUP_RANKS.set(1 if loaded.group is None else loaded.group.comm.size)
    if loaded.group is not None:
        loaded.group.on_lost = lambda reason: loop.call_soon_threadsafe(partial(fail, reason))
    return lost


async def _until_lost(lost: asyncio.Future[None]) -> None:
    await asyncio.shield(lost)


async def _build_context(
    config: WorkerConfig, loaded: LoadedEngine, events: EngineEvents, tasks: asyncio.TaskGroup
) -> WorkerContext:
    engine = loaded.engine
    memory = open_blocks(engine.pool_memory, loaded.device)
    channels = ChannelPool()
    fallback = GrpcTransport(channels, memory)
    transports = choose_transports(config.transport, config.peer_host, fallback, memory)
    endpoint = advertised_endpoint(transports)
    choose = AlwaysFetch if config.store_fetch_policy is StoreFetchPolicy.ALWAYS else FetchCostModel
    cost_model = choose(loaded.engine_config.block_tokens, loaded.engine_config.chunk_tokens)
    events.on_computed = cost_model.on_computed
    store = StoreClient(config.kvstore_addr, memory, loaded.fingerprint, engine.unpin, cost_model)
    await store.connect()
    events.on_sealed = store.offer
    boot_id = uuid.uuid4().hex
    kv_events = KvEventPublisher(config.kvstore_addr, config.worker_id, boot_id, loaded.fingerprint)
    events.on_cache_changes = kv_events.on_changes
    tasks.create_task(kv_events.run())
    tasks.create_task(PoolPrefaulter(memory, lambda: engine.load).run())
    return WorkerContext(
        worker_id=config.worker_id,
        boot_id=boot_id,
        engine=engine,
        events=events,
        fingerprint=loaded.fingerprint,
        memory=memory,
        transports=transports,
        endpoint=endpoint,
        channels=channels,
        store=store,
        tasks=tasks,
        with_checksums=needs_checksums(endpoint.transport),
        grammars=_grammar_compiler(config, loaded),
        lease_seconds=config.lease_seconds,
    )


def _grammar_compiler(config: WorkerConfig, loaded: LoadedEngine) -> GrammarCompiler:
    if config.model is None:
        return GrammarCompiler()
    limits = loaded.engine_config
    return GrammarCompiler(partial(load_grammars, config.model, limits.vocab_size, limits.eos_token_ids))


def _hello(
    config: WorkerConfig, roles: Sequence[RoleService], context: WorkerContext, loaded: LoadedEngine, bound: str
) -> WorkerHello:
    address = config.peer_address(bound.rpartition(":")[2])
    metrics_address = config.peer_address(config.metrics_port)
    logger.info("listening at=%s metrics=%s boot=%s", address, metrics_address, context.boot_id)
    return WorkerHello(
        address=WorkerAddress(context.worker_id, context.boot_id, address),
        role=config.role,
        model=config.served_name,
        fingerprint=context.fingerprint,
        num_blocks=loaded.engine_config.num_blocks,
        max_context_tokens=loaded.engine_config.context_tokens,
        transport=context.endpoint.transport,
        metrics_address=metrics_address,
        can_change_role=len(roles) > 1,
        sampling_version=SAMPLING_VERSION,
        layout=config.layout.short,
    )


async def _join_fleet(membership: Membership, health: WorkerHealth, progress: LoadProgress) -> None:
    await membership.until_joined()
    progress.is_done = True
    log.startup_phase(log.JOINING)
    await health.join()


async def _serve_until_drained(
    config: WorkerConfig,
    membership: Membership,
    drain: Callable[[float], Awaitable[None]],
    watches: Sequence[Coroutine[Any, Any, None]],
) -> SleepState | None:
    """Serve until a signal, or until a scheduler puts the worker to sleep; running requests have ended then."""
    is_ending = await until_signal(*watches, or_when=membership.until_sleep_changes)
    if not is_ending:
        # A signal takes precedence over sleep.
        grace = max(SLEEP_GRACE_SECONDS, config.grace_seconds)
        is_ending = await until_signal(or_when=partial(drain, grace))
    if is_ending:
        await drain(config.grace_seconds)
        return None
    return SleepState(membership.hello, membership.is_asleep)


async def _watch_engine(engine: Engine, health: WorkerHealth) -> None:
    while engine.is_alive:  # a dead or hanging thread reports nothing itself
        await health.check()
        await asyncio.sleep(WATCH_SECONDS)
    raise EngineFailed("the engine's thread ended")


async def _drain(
    grace_seconds: float, clients: Sequence[EngineClient[Any]], membership: Membership, rpc: RpcServer
) -> None:
    """Leave the fleet, then wait up to `grace_seconds` for running requests."""
    await rpc.set_ready(False)
    for client in clients:
        client.close()
    await membership.leave(LEAVE_SECONDS)
    try:
        async with asyncio.timeout(grace_seconds):
            for client in clients:
                await client.until_idle()
    except TimeoutError:
        logger.warning("requests aborted, grace period over seconds=%g", grace_seconds)


async def _release(context: WorkerContext) -> None:
    """Release all resources. A library that does not return ends the process; the supervisor starts another."""
    try:
        async with asyncio.timeout(RELEASE_SECONDS):
            context.grammars.close()
            await context.store.close()
            for transport in context.transports:
                await transport.close()
            await context.channels.close()
    except TimeoutError:
        logger.error("transfers did not end, exiting seconds=%g", RELEASE_SECONDS)
        os._exit(1)


class EngineHealth:
    """Health of engine and pool. `load` returns the engine's latest load."""

    def __init__(
        self,
        watchdog: StepWatchdog,
        load: Callable[[], EngineLoad],
        num_blocks: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watchdog = watchdog
        self._load = load
        self._num_blocks = num_blocks
        self._clock = clock
        self._exhausted_at: float | None = None
        self._num_tokens = 0

    @property
    def is_lost(self) -> bool:
        """True if the engine's thread hangs for good."""
        return self._watchdog.step_age > max(LOST_SECONDS, self._watchdog.hang_timeout)

    def trouble(self) -> str:
        """Return why the worker takes no more requests; empty if it does."""
        load = self._load()
        if self._watchdog.is_hung:
            return f"the engine has hung for {self._watchdog.step_age:.0f} s"
        if 2 * load.quarantined_blocks > self._num_blocks:
            return f"{load.quarantined_blocks} of {self._num_blocks} blocks are quarantined"
        if self._is_exhausted(load):
            return f"no free block and no new token for {EXHAUSTED_SECONDS:.0f} s"
        return ""

    def _is_exhausted(self, load: EngineLoad) -> bool:
        num_tokens = load.generated_tokens + load.computed_prompt_tokens
        if load.free_blocks + load.cached_blocks or num_tokens != self._num_tokens:
            self._exhausted_at, self._num_tokens = None, num_tokens
            return False
        now = self._clock()
        self._exhausted_at = now if self._exhausted_at is None else self._exhausted_at
        return now - self._exhausted_at > EXHAUSTED_SECONDS


class WorkerHealth:
    """Ready after joining, as long as the engine is healthy."""

    def __init__(self, engine_health: EngineHealth, rpc: RpcServer) -> None:
        self._engine_health = engine_health
        self._rpc = rpc
        self._has_joined = False
        self._trouble = ""

    @property
    def is_healthy(self) -> bool:
        """The result of the last check."""
        return not self._trouble

    async def join(self) -> None:
        """Become ready: a scheduler has accepted this worker."""
        self._has_joined = True
        await self._publish()

    async def check(self) -> None:
        """Check the engine; call periodically. Raises EngineFailed if the engine hangs for good."""
        if self._engine_health.is_lost:
            raise EngineFailed("the engine's thread hangs")
        trouble = self._engine_health.trouble()
        if bool(trouble) == bool(self._trouble):
            return
        self._trouble = trouble
        logger.warning("worker unhealthy reason=%s" if trouble else "worker healthy again%s", trouble)
        await self._publish()

    async def _publish(self) -> None:
        await self._rpc.set_ready(self._has_joined and not self._trouble)


@dataclass(frozen=True, slots=True)
class SleepState:
    """A worker that stays in the fleet without engine, weights or pool, and not ready, until it is woken.

    - `hello`: its hello while it sleeps.
    - `is_asleep`: False if it was woken while it still drained.
    """

    hello: WorkerHello
    is_asleep: bool


def release_memory() -> None:
    """Return unused memory to the device and the system."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


async def _release_again() -> None:
    """Release what libraries still held when the worker fell asleep, such as the last calls of a gRPC server.

    A sleeping process creates no objects, so the collector would not run again by itself.
    """
    for seconds in RELEASE_AGAIN_SECONDS:
        await asyncio.sleep(seconds)
        release_memory()


async def sleep_until_woken(schedulers: str, sleeping: SleepState) -> WorkerHello | None:
    """Sleep until woken; return the hello to wake with, or None if a signal ends the process."""
    if not sleeping.is_asleep:
        return sleeping.hello
    membership = Membership(schedulers, sleeping.hello, EngineLoad, lambda: False, is_asleep=True)
    logger.info("asleep, weights and pool released")
    async with background_tasks() as tasks:
        tasks.create_task(membership.run())
        tasks.create_task(_release_again())
        is_ending = await until_signal(or_when=membership.until_sleep_changes)
        return None if is_ending else membership.hello
