"""Embeddings over the mesh: each input goes to the prefill worker that has least to do. No wire, no HTTP."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from dataclasses import replace

from weft.errors import EngineFailed, Overloaded, PeerLost
from weft.ids import new_id
from weft.request import RequestKey, WorkerRole
from weft_services.gateway.mesh.fleet import FleetWatch
from weft_services.gateway.mesh.placement import EmbedOrder
from weft_services.gateway.mesh.prefill_peers import PrefillPeers
from weft_services.gateway.mesh.prepare import PreparedEmbedding
from weft_services.gateway.mesh.workers import Worker

MAX_AT_A_TIME = 32  # inputs of one request
MAX_ATTEMPTS = 3

Vector = tuple[float, ...]


class Embeddings:
    """What is sent and not answered yet counts beside what workers last reported."""

    def __init__(self, watch: FleetWatch, peers: PrefillPeers) -> None:
        self._watch = watch
        self._peers = peers
        self._sent: Counter[str] = Counter()  # tokens by boot id

    async def embed(self, prepared: PreparedEmbedding, priority: int, seconds: float) -> list[Vector]:
        """One vector of length 1 for each input. Raises DeadlineExceeded, Overloaded, PeerLost, EngineFailed."""
        places = asyncio.Semaphore(MAX_AT_A_TIME)
        deadline = asyncio.get_running_loop().time() + seconds

        async def one(token_ids: tuple[int, ...]) -> Vector:
            order = EmbedOrder(RequestKey(new_id(), 0), token_ids, prepared.cache_salt, priority)
            async with places:
                return _unit(await self._on_some_worker(prepared.asked.model, order, deadline))

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(token_ids)) for token_ids in prepared.inputs]
        return [task.result() for task in tasks]

    async def _on_some_worker(self, model: str, order: EmbedOrder, deadline: float) -> Vector:
        """The same input gives the same vector anywhere, so a worker that fails is followed by another."""
        failed = set[str]()
        problem: PeerLost | EngineFailed | Overloaded = PeerLost("no prefill worker is ready")
        for attempt in range(MAX_ATTEMPTS):
            worker = self._least_busy(model, failed)
            if worker is None:
                break
            boot_id, seconds = worker.address.boot_id, deadline - asyncio.get_running_loop().time()
            order = replace(order, key=RequestKey(order.key.request_id, attempt))
            self._sent[boot_id] += len(order.token_ids)
            try:
                return await self._peers.embed(worker.address, order, max(seconds, 0.0))
            except (PeerLost, EngineFailed, Overloaded) as error:
                problem = error
                failed.add(boot_id)
            finally:
                self._sent[boot_id] -= len(order.token_ids)
                self._sent += Counter()  # forgets workers that nothing is sent to
        raise problem

    def _least_busy(self, model: str, failed: set[str]) -> Worker | None:
        able = [
            worker
            for worker in self._watch.of(model).workers
            if worker.serves and worker.role.can(WorkerRole.PREFILL) and worker.address.boot_id not in failed
        ]
        return min(able, key=self._num_waiting, default=None)

    def _num_waiting(self, worker: Worker) -> tuple[bool, int]:
        """At one whose pool is full even the first waits."""
        return not worker.is_ready, max(worker.work.queued_prefill_tokens, self._sent[worker.address.boot_id])


def _unit(vector: Vector) -> Vector:
    length = math.hypot(*vector)
    if not 0 < length < math.inf:
        raise EngineFailed("the hidden states are no numbers")
    return tuple(value / length for value in vector)
