"""Builds the gateway from its parts: start, serve, drain, stop."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from weft import log, metrics
from weft.file_descriptors import raise_fd_limit
from weft.rpc.server import RpcServer, freeze_startup_objects, until_signal
from weft.stall_clock import StallAwareClock
from weft_services.gateway.access.authentication import Authenticator
from weft_services.gateway.config import GatewayConfig
from weft_services.gateway.front.listeners import Listeners
from weft_services.gateway.front.request_record import init_series
from weft_services.gateway.front.responses import ResponseStore
from weft_services.gateway.mesh.decode_connection import DecodeConnectionPool
from weft_services.gateway.mesh.embeddings import EmbeddingRunner
from weft_services.gateway.mesh.fleet import POLL_INTERVAL_SECONDS, FleetWatcher
from weft_services.gateway.mesh.generation_run import MeshContext
from weft_services.gateway.mesh.pipeline import Pipeline
from weft_services.gateway.mesh.scheduler_client import SchedulerClient, SettlementQueue
from weft_services.gateway.model import load_catalog

logger = logging.getLogger(__name__)

# Switch interval: bounds how long a thread with a long prompt keeps the event loop waiting. Python's default of 5 ms
# adds up over threads.
SWITCH_SECONDS = 0.0005
# Time for requests to notice that their streams have ended.
CANCEL_GRACE_SECONDS = 0.1
# M_MMAP_THRESHOLD of malloc.h.
M_MMAP_THRESHOLD, MMAP_BYTES = -3, 2**20


@dataclass(frozen=True, slots=True)
class Gateway:
    """A running gateway with its addresses."""

    http_address: str
    grpc_address: str
    private_address: str
    pipeline: Pipeline
    watch: FleetWatcher


async def serve(config: GatewayConfig) -> None:
    """Run the process: serve until SIGTERM or SIGINT, then drain."""
    sys.setswitchinterval(SWITCH_SECONDS)
    raise_fd_limit()
    _lower_mmap_threshold()
    async with running(config) as gateway:
        addresses = (gateway.http_address, gateway.grpc_address, gateway.private_address)
        logger.info("listening http=%s grpc=%s private=%s", *addresses)
        freeze_startup_objects()
        await until_signal()
        logger.info("draining in_flight=%d", gateway.pipeline.num_in_flight)


def _lower_mmap_threshold() -> None:
    """Make malloc return freed blocks of 1 MiB and more to the system.

    By default glibc keeps the memory of large bodies for later ones.
    """
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)


@asynccontextmanager
async def running(config: GatewayConfig) -> AsyncIterator[Gateway]:
    """Yield a gateway that listens; drain it on exit. Raises BadCheckpoint, BindError."""
    models = await asyncio.to_thread(
        load_catalog, config.models, config.tool_formats, not config.allow_user_special_tokens
    )
    init_series(models.names)
    for model in models:
        logger.info("model=%s context=%d defaults=%s", model.name, model.max_context_tokens, model.defaults)
        tools = model.tool_format.name if model.tool_format else "none"
        logger.info("model=%s tools=%s thoughts=%s", model.name, tools, "".join(model.thought_tags or ()) or "none")
    log.startup_phase("models")
    authenticator = Authenticator(config.keys, config.redis_url, config.allow_unauthenticated)
    await authenticator.open()
    store = _open_response_store(config)
    scheduler = SchedulerClient(config.scheduler_addr)
    async with asyncio.TaskGroup() as group:
        links, settler = DecodeConnectionPool(group), SettlementQueue(scheduler)
        clock = StallAwareClock(on_standstill=metrics.STALLED_SECONDS.inc)
        watch = FleetWatcher(scheduler, models.names, clock)
        mesh = MeshContext(
            *(scheduler, links, settler, group, config.migration_timeout_seconds, watch.events.publish),
            was_served_recently=lambda model: watch.was_served_recently(model, config.migration_timeout_seconds),
            clock=clock,
        )
        embeddings = EmbeddingRunner(watch, config.migration_timeout_seconds, clock)
        pipeline = Pipeline(models, mesh, embeddings, watch, config.max_requests)
        ticking = group.create_task(clock.tick(), name="clock")
        listeners = Listeners(config, pipeline, authenticator, store)
        await listeners.start(group)
        authenticating = group.create_task(authenticator.run(pipeline.abort_revoked), name="authentication")
        routing = group.create_task(scheduler.run(), name="routes")
        settling = group.create_task(settler.run(), name="settler")
        watching = group.create_task(_watch_fleet(watch, links, listeners.rpc), name="fleet")
        try:
            yield Gateway(*listeners.addresses, pipeline, watch)
        finally:
            watching.cancel()
            pipeline.is_draining = True
            watch.events.close()
            await _drain(listeners, pipeline, links, config.grace_seconds)
            for each in (authenticating, settling, routing, ticking):
                each.cancel()
            pipeline.close()
            await embeddings.close()
            if store is not None:
                await store.close()
    await settler.flush()
    await scheduler.close()


def _open_response_store(config: GatewayConfig) -> ResponseStore | None:
    keeps = bool(config.redis_url and config.responses_seconds)
    return ResponseStore(config.redis_url, config.responses_seconds) if keeps else None


async def _drain(listeners: Listeners, pipeline: Pipeline, links: DecodeConnectionPool, grace_seconds: float) -> None:
    """Reject new requests, give running ones `grace_seconds` to finish, then close the listeners."""
    listeners.refuse()
    await listeners.rpc.set_ready(False)
    await pipeline.wait_idle(grace_seconds)
    links.close()  # running requests end now, with an error that their clients receive
    await pipeline.wait_idle(CANCEL_GRACE_SECONDS)
    pipeline.abort_all()  # end requests without a worker too
    await listeners.stop()


async def _watch_fleet(watch: FleetWatcher, links: DecodeConnectionPool, rpc: RpcServer) -> None:
    """Poll the fleet every second and whenever a stream is lost. Update readiness and drop unused streams."""
    while True:
        await watch.poll()
        await rpc.set_ready(watch.is_ready)
        if (boot_ids := watch.boot_ids) is not None:
            links.close_absent(boot_ids)
        await links.wait_lost(POLL_INTERVAL_SECONDS)
