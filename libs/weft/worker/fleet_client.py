"""Client of the schedulers: load progress while starting, then hello and reports while the process lives.

Load progress is best effort: nothing waits for it, and a scheduler that is away or does not know the call changes
nothing.

A worker retries a scheduler that is away, and keeps serving without one. Draining, sleep and role changes are kept
here, so that every scheduler receives them, also one that joins later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace

from weft.engine.messages import EngineLoad
from weft.errors import WeftError
from weft.fleet_types import LoadingWorker, WorkerHello, WorkerReport, WorkerStats
from weft.request import WorkerRole
from weft.rpc.client import cancelled_on_exit, open_channel, send_failures_raised
from weft.rpc.fleet_wire import hello_to_wire, loading_to_wire, report_to_wire
from weft.rpc.wire import (
    role_from_wire,
    transfer_stats_to_wire,
)
from weft_mesh.v1 import common_pb2, scheduler_service_pb2, scheduler_service_pb2_grpc

logger = logging.getLogger(__name__)
INTERVAL_SECONDS = 0.5
RETRY_SECONDS = 1.0
MIN_BACKOFF_SECONDS = 0.1
MAX_BACKOFF_SECONDS = 2.0


@dataclass(slots=True)
class LoadProgress:
    """Progress of loading. The loader may write it from any thread; it is read twice a second.

    `total_bytes` is 0 if the phase is not counted in bytes.
    """

    worker_id: str
    role: WorkerRole
    model: str
    phase: str = "starting"
    done_bytes: int = 0
    total_bytes: int = 0
    is_done: bool = False

    def set_phase(self, phase: str) -> None:
        """Start a phase that is not yet counted in bytes."""
        self.phase, self.done_bytes, self.total_bytes = phase, 0, 0

    def set_bytes(self, done_bytes: int, total_bytes: int) -> None:
        """Set the progress of the current phase."""
        self.done_bytes, self.total_bytes = done_bytes, total_bytes


@asynccontextmanager
async def reporting_progress(schedulers: str, progress: LoadProgress) -> AsyncIterator[None]:
    """Report progress to every scheduler (comma-separated host:port) during the scope, or until it is done."""
    reporting = [asyncio.create_task(_announce(address.strip(), progress)) for address in schedulers.split(",")]
    try:
        yield
    finally:
        for task in reporting:
            task.cancel()
        for outcome in await asyncio.gather(*reporting, return_exceptions=True):
            if isinstance(outcome, Exception):
                logger.error("load progress reporting failed", exc_info=outcome)


async def _announce(address: str, progress: LoadProgress) -> None:
    async with open_channel(address) as channel:
        stub = scheduler_service_pb2_grpc.FleetServiceStub(channel)
        while not progress.is_done:
            try:
                with send_failures_raised("the load progress report"):
                    async with cancelled_on_exit(stub.Announce(_messages(progress))) as call:
                        await call
            except WeftError as error:
                logger.debug("load progress not reported scheduler=%s error=%s", address, error)
            await asyncio.sleep(RETRY_SECONDS)


async def _messages(progress: LoadProgress) -> AsyncIterator[scheduler_service_pb2.AnnounceRequest]:
    while not progress.is_done:
        yield scheduler_service_pb2.AnnounceRequest(
            arrival=loading_to_wire(
                LoadingWorker(
                    *(progress.worker_id, progress.role, progress.model, progress.phase),
                    *(progress.done_bytes, progress.total_bytes),
                )
            )
        )
        await asyncio.sleep(INTERVAL_SECONDS)


class _SchedulerLink:
    """State of the connection to one scheduler."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.interval_seconds = 1.0
        self.has_joined = False
        self.has_left = asyncio.Event()


class Membership:
    """Joins every given scheduler and sends the same reports to all.

    `run` never returns; `leave` sends a final report with ready=false at once.
    """

    def __init__(
        self,
        schedulers: str,
        hello: WorkerHello,
        load: Callable[[], EngineLoad],
        is_able: Callable[[], bool],
        stats: Callable[[], WorkerStats] = WorkerStats,
        is_asleep: bool = False,
    ) -> None:
        """- `schedulers`: comma-separated host:port.\n- `is_asleep`: it starts asleep."""
        self._hello = hello
        self._load = load
        self._is_able = is_able
        self._stats = stats
        self._is_draining = hello.is_draining
        self._is_asleep = is_asleep
        self._sleep_changes = asyncio.Event()
        self._role = hello.role
        self._has_joined = asyncio.Event()
        self._is_leaving = asyncio.Event()
        self._links = [_SchedulerLink(address.strip()) for address in schedulers.split(",")]

    async def until_joined(self) -> None:
        """Wait until the first scheduler has answered."""
        await self._has_joined.wait()

    @property
    def is_asleep(self) -> bool:
        """The state that a scheduler requested last."""
        return self._is_asleep

    async def until_sleep_changes(self) -> None:
        """Wait until a scheduler puts a running worker to sleep, or wakes a sleeping one."""
        await self._sleep_changes.wait()

    @property
    def hello(self) -> WorkerHello:
        """The hello with the current role and drain state."""
        return replace(self._hello, role=self._role, is_draining=self._is_draining)

    async def leave(self, timeout_seconds: float) -> None:
        """Report not-ready, and wait until every scheduler has the report or the time is over."""
        self._is_leaving.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                for link in self._links:
                    await link.has_left.wait()

    async def run(self) -> None:
        """Join and report, and join again whenever a stream breaks."""
        async with asyncio.TaskGroup() as group:
            for link in self._links:
                group.create_task(self._run_link(link))

    async def _run_link(self, link: _SchedulerLink) -> None:
        backoff = MIN_BACKOFF_SECONDS
        channel = open_channel(link.address)
        try:
            while True:
                try:
                    stub = scheduler_service_pb2_grpc.FleetServiceStub(channel)
                    with send_failures_raised("the report stream"):
                        async with cancelled_on_exit(stub.Join(self._messages(link))) as stream:
                            async for response in stream:
                                self._on_response(link, response)
                                backoff = MIN_BACKOFF_SECONDS
                    logger.warning("scheduler ended the membership, joining again address=%s", link.address)
                except WeftError as error:
                    if backoff == MIN_BACKOFF_SECONDS:
                        logger.warning("scheduler unreachable, retrying address=%s error=%s", link.address, error)
                await asyncio.sleep(backoff)
                backoff = min(2 * backoff, MAX_BACKOFF_SECONDS)
        finally:
            await channel.close()

    def _on_response(self, link: _SchedulerLink, response: scheduler_service_pb2.JoinResponse) -> None:
        link.interval_seconds = response.report_interval_ms / 1000
        if response.HasField("drain") and response.drain != self._is_draining:
            logger.info("%s scheduler=%s", "draining" if response.drain else "drain cancelled", link.address)
            self._is_draining = response.drain
        if response.HasField("sleep") and response.sleep != self._is_asleep:
            logger.info("%s scheduler=%s", "falling asleep" if response.sleep else "waking", link.address)
            self._is_asleep = response.sleep
            self._sleep_changes.set()
        if response.role != common_pb2.WORKER_ROLE_UNSPECIFIED:
            self._change_role(role_from_wire(response.role), link)
        if not link.has_joined:
            logger.info("joined scheduler=%s", link.address)
            link.has_joined = True
            self._has_joined.set()

    def _change_role(self, role: WorkerRole, link: _SchedulerLink) -> None:
        """Change the reported role. Running requests continue: both services stay up."""
        if role is not self._role and self._hello.can_change_role:
            logger.info("role changed role=%s from=%s scheduler=%s", role, self._role, link.address)
            self._role = role

    async def _messages(self, link: _SchedulerLink) -> AsyncIterator[scheduler_service_pb2.JoinRequest]:
        yield scheduler_service_pb2.JoinRequest(hello=hello_to_wire(replace(self._hello, role=self._role)))
        while True:
            is_leaving = self._is_leaving.is_set()
            yield scheduler_service_pb2.JoinRequest(report=report_to_wire(self._report(is_leaving)))
            if is_leaving:
                # gRPC requests the next message only after it has sent this one.
                link.has_left.set()
                await asyncio.sleep(link.interval_seconds)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(link.interval_seconds):
                    await self._is_leaving.wait()

    def _report(self, is_leaving: bool) -> WorkerReport:
        load, stats = self._load(), self._stats()
        is_serving = self._is_able() and not (is_leaving or self._is_draining or self._is_asleep)
        has_room = load.free_blocks + load.cached_blocks > 0
        return WorkerReport(
            **asdict(load),
            ready=is_serving and has_room,
            full=is_serving and not has_room,
            is_draining=self._is_draining,
            is_asleep=self._is_asleep,
            role=self._role,
            stats=stats,
            hand_offs=transfer_stats_to_wire(stats.transfers),
        )
