"""A worker's place in the fleet: hello, then reports at the scheduler's pace, for as long as the process lives.

A scheduler that is away is waited for; a worker without one goes on with what it has.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass

from weft.engine.messages import EngineLoad
from weft.errors import WeftError
from weft.request import ModelFingerprint, WorkerAddress, WorkerRole
from weft.rpc.client import open_channel, owned
from weft.rpc.wire import address_to_wire, fingerprint_to_wire, role_to_wire
from weft_mesh.v1 import scheduler_service_pb2, scheduler_service_pb2_grpc

logger = logging.getLogger(__name__)
MIN_BACKOFF_SECONDS = 0.1
MAX_BACKOFF_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Introduction:
    """What a worker says of itself when it joins."""

    worker: WorkerAddress
    role: WorkerRole
    model: str
    fingerprint: ModelFingerprint
    num_blocks: int
    max_context_tokens: int
    transport: str
    metrics_address: str


class Membership:
    """`keep` runs for ever; `leave` makes the next report say "not ready", at once."""

    def __init__(
        self, scheduler: str, introduction: Introduction, load: Callable[[], EngineLoad], is_able: Callable[[], bool]
    ) -> None:
        self._scheduler = scheduler
        self._introduction = introduction
        self._load = load
        self._is_able = is_able
        self._interval_seconds = 1.0
        self._has_joined = asyncio.Event()
        self._is_leaving = asyncio.Event()
        self._has_left = asyncio.Event()

    async def until_joined(self) -> None:
        """The scheduler has answered once."""
        await self._has_joined.wait()

    async def leave(self, timeout_seconds: float) -> None:
        """Take no more work: wait until the scheduler has been told, or the time is over."""
        self._is_leaving.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._has_left.wait()

    async def keep(self) -> None:
        """Join, report, and join again whenever the stream breaks."""
        backoff = MIN_BACKOFF_SECONDS
        channel = open_channel(self._scheduler)
        try:
            while True:
                try:
                    stub = scheduler_service_pb2_grpc.FleetServiceStub(channel)
                    async with owned(stub.Join(self._messages())) as stream:
                        async for response in stream:
                            self._on_response(response)
                            backoff = MIN_BACKOFF_SECONDS
                    logger.warning("the scheduler at %s ended our membership; joining again", self._scheduler)
                except WeftError as error:
                    if backoff == MIN_BACKOFF_SECONDS:
                        logger.warning("no scheduler at %s (%s); trying on", self._scheduler, error)
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, MAX_BACKOFF_SECONDS)
        finally:
            await channel.close()

    def _on_response(self, response: scheduler_service_pb2.JoinResponse) -> None:
        self._interval_seconds = response.report_interval_ms / 1000
        if not self._has_joined.is_set():
            logger.info("joined the fleet at %s", self._scheduler)
            self._has_joined.set()

    async def _messages(self) -> AsyncIterator[scheduler_service_pb2.JoinRequest]:
        yield scheduler_service_pb2.JoinRequest(hello=_hello_to_wire(self._introduction))
        while True:
            is_leaving = self._is_leaving.is_set()
            yield scheduler_service_pb2.JoinRequest(report=self._report(is_leaving))
            if is_leaving:
                # being asked for the next message means that this one has been sent
                self._has_left.set()
                await asyncio.sleep(self._interval_seconds)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(self._interval_seconds):
                    await self._is_leaving.wait()

    def _report(self, is_leaving: bool) -> scheduler_service_pb2.WorkerReport:
        load = self._load()
        has_room = load.free_blocks + load.cached_blocks > 0
        return scheduler_service_pb2.WorkerReport(
            num_running=load.num_running,
            num_waiting=load.num_waiting,
            queued_prefill_tokens=load.queued_prefill_tokens,
            active_tokens=load.active_tokens,
            free_blocks=load.free_blocks,
            cached_blocks=load.cached_blocks,
            active_blocks=load.active_blocks,
            quarantined_blocks=load.quarantined_blocks,
            ready=self._is_able() and has_room and not is_leaving,
            generated_tokens=load.generated_tokens,
            computed_prompt_tokens=load.computed_prompt_tokens,
        )


def _hello_to_wire(introduction: Introduction) -> scheduler_service_pb2.WorkerHello:
    return scheduler_service_pb2.WorkerHello(
        worker=address_to_wire(introduction.worker),
        role=role_to_wire(introduction.role),
        model=introduction.model,
        fingerprint=fingerprint_to_wire(introduction.fingerprint),
        num_blocks=introduction.num_blocks,
        max_context_tokens=introduction.max_context_tokens,
        transport=introduction.transport,
        metrics_address=introduction.metrics_address,
    )
