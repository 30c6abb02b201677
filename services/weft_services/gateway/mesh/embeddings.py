"""Runs embedding requests: each input goes to the prefill worker with the least work."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable

from weft.errors import BadCheckpoint, Cancelled, EngineFailed, NoWorker, Overloaded, PeerLost
from weft.fleet_types import WorkerStatus
from weft.request import RequestKey, WorkerAddress, WorkerRole, new_id
from weft.rpc import wire
from weft.rpc.client import ChannelPool, rpc_errors_translated
from weft_mesh.v1 import prefill_service_pb2 as prefill_pb
from weft_mesh.v1.prefill_service_pb2_grpc import PrefillServiceStub
from weft_services.gateway.mesh.fleet import FleetWatcher
from weft_services.gateway.mesh.prepare import PreparedEmbedding

MAX_AT_A_TIME = 32  # inputs of one request
MAX_ATTEMPTS = 3
# Attempts in total, including retries of failed workers: an input that crashes workers must not take down the fleet.
MAX_TRIES = 2 * MAX_ATTEMPTS
# Wait before retrying failed workers, and between looks at a fleet without a usable worker. The fleet is polled as
# often.
PAUSE_SECONDS = 1.0

Vector = tuple[float, ...]
EmbedRequest = prefill_pb.PrefillServiceEmbedRequest


class EmbeddingRunner:
    """Distributes inputs over workers. Tokens in flight count in addition to the workers' last reports."""

    def __init__(
        self,
        watch: FleetWatcher,
        migration_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`migration_seconds`: how long an input waits for a worker that was there recently."""
        self._watch = watch
        self._channels = ChannelPool()  # to the prefill workers
        self._migration_seconds = migration_seconds
        self._clock = clock
        self._sent: Counter[str] = Counter()  # tokens in flight by boot id

    async def embed(self, prepared: PreparedEmbedding, priority: int, seconds: float) -> list[Vector]:
        """Return one unit vector per input. Raises DeadlineExceeded, Overloaded, PeerLost, EngineFailed."""
        places = asyncio.Semaphore(MAX_AT_A_TIME)
        deadline = asyncio.get_running_loop().time() + seconds

        async def one(token_ids: tuple[int, ...]) -> Vector:
            request = EmbedRequest(token_ids=token_ids, priority=priority, cache_salt=prepared.cache_salt)
            async with places:
                return _unit(await self._embed_with_retries(prepared.asked.model, request, deadline))

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(token_ids)) for token_ids in prepared.inputs]
        return [task.result() for task in tasks]

    async def close(self) -> None:
        await self._channels.close()

    async def _embed_with_retries(self, model: str, request: EmbedRequest, deadline: float) -> Vector:
        """Embed one input, on another worker after a failure; the vector is the same on all."""
        request_id, failed = new_id(), set[str]()
        problem: PeerLost | EngineFailed | Overloaded = NoWorker("no prefill worker is ready")
        give_up_at = self._clock() + self._migration_seconds
        generation = 0
        while generation < MAX_TRIES:
            worker = self._least_busy(model, failed) if len(failed) < MAX_ATTEMPTS else None
            if worker is None:
                if not isinstance(problem, PeerLost) or not self._may_wait(model, give_up_at, deadline):
                    break
                await asyncio.sleep(PAUSE_SECONDS)
                failed.clear()
                continue
            boot_id, seconds = worker.address.boot_id, deadline - asyncio.get_running_loop().time()
            request.key.CopyFrom(wire.key_to_wire(RequestKey(request_id, generation)))
            generation += 1
            self._sent[boot_id] += len(request.token_ids)
            try:
                return await self._embed(worker.address, request, max(seconds, 0.0))
            except (PeerLost, EngineFailed, Overloaded) as error:
                problem = error
                failed.add(boot_id)
            finally:
                self._sent[boot_id] -= len(request.token_ids)
                self._sent += Counter()  # drops entries of 0
        raise problem

    async def _embed(self, worker: WorkerAddress, request: EmbedRequest, seconds: float) -> Vector:
        """Return the mean hidden state of a prompt. Raises WeftError."""
        request.prefill_boot_id = worker.boot_id
        try:
            async with self._channels.channel(worker.address) as channel:
                with rpc_errors_translated():
                    response = await PrefillServiceStub(channel).Embed(request, timeout=seconds)
        except (BadCheckpoint, Cancelled) as error:  # the worker restarted or is shutting down
            raise PeerLost(str(error)) from error
        return tuple(response.values)

    def _may_wait(self, model: str, give_up_at: float, deadline: float) -> bool:
        """True if a lost worker may return in time."""
        now, loop_now = self._clock(), asyncio.get_running_loop().time()
        is_in_time = now + PAUSE_SECONDS <= give_up_at and loop_now + PAUSE_SECONDS < deadline
        return is_in_time and self._watch.was_served_recently(model, self._migration_seconds)

    def _least_busy(self, model: str, failed: set[str]) -> WorkerStatus | None:
        able = [
            worker
            for worker in self._watch.of(model).workers
            if worker.is_serving and worker.role.can(WorkerRole.PREFILL) and worker.address.boot_id not in failed
        ]
        return min(able, key=self._num_waiting, default=None)

    def _num_waiting(self, worker: WorkerStatus) -> tuple[bool, int]:
        """Sort key: workers with a full pool last, then by queued tokens."""
        return not worker.report.ready, max(worker.report.queued_prefill_tokens, self._sent[worker.address.boot_id])


def _unit(vector: Vector) -> Vector:
    length = math.hypot(*vector)
    if not 0 < length < math.inf:
        raise EngineFailed("the hidden states are not finite or all zero")
    return tuple(value / length for value in vector)
