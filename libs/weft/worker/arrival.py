"""What a worker tells schedulers while it loads its model: that it comes, and how far it is. Best effort: nothing waits
for it, and a scheduler that is away or has no ear for it changes nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from weft.errors import WeftError
from weft.request import WorkerRole
from weft.rpc.client import open_channel, own_fault_told, owned
from weft.rpc.wire import role_to_wire
from weft_mesh.v1 import scheduler_service_pb2, scheduler_service_pb2_grpc

logger = logging.getLogger(__name__)
INTERVAL_SECONDS = 0.5
RETRY_SECONDS = 1.0


@dataclass(slots=True)
class Arrival:
    """Written by whoever loads, on any thread; read twice a second. `total_bytes` 0: not counted in bytes."""

    worker_id: str
    role: WorkerRole
    model: str
    phase: str = "starting"
    done_bytes: int = 0
    total_bytes: int = 0
    is_over: bool = False

    def turn_to(self, phase: str) -> None:
        """Another phase begins, whose end cannot be told in bytes yet."""
        self.phase, self.done_bytes, self.total_bytes = phase, 0, 0

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        """Of the phase."""
        self.done_bytes, self.total_bytes = done_bytes, total_bytes


@asynccontextmanager
async def announced(schedulers: str, arrival: Arrival) -> AsyncIterator[None]:
    """Every one of `schedulers` (host:port, several by commas) is told while the scope lasts, or until it is over."""
    telling = [asyncio.create_task(_announce(address.strip(), arrival)) for address in schedulers.split(",")]
    try:
        yield
    finally:
        for task in telling:
            task.cancel()
        for outcome in await asyncio.gather(*telling, return_exceptions=True):
            if isinstance(outcome, Exception):
                logger.error("a scheduler was not told that this worker comes", exc_info=outcome)


async def _announce(address: str, arrival: Arrival) -> None:
    async with open_channel(address) as channel:
        stub = scheduler_service_pb2_grpc.FleetServiceStub(channel)
        while not arrival.is_over:
            try:
                with own_fault_told("our announcement"):
                    async with owned(stub.Announce(_messages(arrival))) as call:
                        await call
            except WeftError as error:
                logger.debug("not announced at %s: %s", address, error)
            await asyncio.sleep(RETRY_SECONDS)


async def _messages(arrival: Arrival) -> AsyncIterator[scheduler_service_pb2.AnnounceRequest]:
    while not arrival.is_over:
        yield scheduler_service_pb2.AnnounceRequest(
            arrival=scheduler_service_pb2.WorkerArrival(
                worker_id=arrival.worker_id,
                role=role_to_wire(arrival.role),
                model=arrival.model,
                phase=arrival.phase,
                done_bytes=arrival.done_bytes,
                total_bytes=arrival.total_bytes,
            )
        )
        await asyncio.sleep(INTERVAL_SECONDS)
