"""A model's live workers, as the policy looks at all of them at once."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from weft.kv.block_keys import fingerprint_digest
from weft.request import WorkerRole
from weft_services.scheduler.speed import USUAL_CREDIT, Credit
from weft_services.scheduler.state import INFINITE, NUM_ROWS, Worker

Row = NDArray[np.float64]  # a number for each worker


class Served:
    """The live workers of one model, sorted by id, and what the policy reads of them: rows with a place (slot) for each
    worker, which the worker writes. Those of both roles stand in both lists.

    `bars`: by role, 0 for each worker that plays it, infinite for the others; `firsts`: the first that plays it, if one
    does. `is_uniform`: all can exchange blocks. `utilization`: share of the prefill workers that had something to
    compute of late. `credit`: what a token in the shared store saves them.
    """

    def __init__(self, workers: Iterable[Worker] = (), utilization: float = 0.0, credit: Credit = USUAL_CREDIT) -> None:
        self.utilization = utilization
        self.credit = credit
        self.workers = sorted(workers, key=lambda worker: worker.worker_id)
        self.slots = {worker: slot for slot, worker in enumerate(self.workers)}
        self.by_id = {worker.worker_id: worker for worker in self.workers}
        self.prefills, self.prefill_slots = self._playing(WorkerRole.PREFILL)
        self.decodes, self.decode_slots = self._playing(WorkerRole.DECODE)
        self.is_uniform = len({worker.info.fingerprint for worker in self.workers}) <= 1
        self.block_tokens = self.workers[0].info.fingerprint.block_tokens if self.workers else 0
        # what the shared store calls this model's blocks by
        self.fingerprint = fingerprint_digest(self.workers[0].info.fingerprint) if self.workers else b""
        self.firsts = {role: self._first(role) for role in WorkerRole}
        self.bars = {role: self._bar(role) for role in (WorkerRole.PREFILL, WorkerRole.DECODE)}
        self._lay_out()

    def of(self, workers: Iterable[Worker]) -> Served:
        """The same model with these workers."""
        return Served(workers, self.utilization, self.credit)

    def _lay_out(self) -> None:
        table = np.empty((NUM_ROWS, len(self.workers)))
        for slot, worker in enumerate(self.workers):
            worker.column = table[:, slot]
            worker.tell()
        self._pressure_seconds, self._prefill_seconds, self._overtaken_seconds, self._token_seconds, *rest = table
        self._decode_seconds, self._decode_token_seconds, self.dispatched_tokens = rest

    def _playing(self, role: WorkerRole) -> tuple[list[Worker], dict[Worker, int]]:
        found = [worker for worker in self.workers if worker.info.role.can(role)]
        return found, {worker: self.slots[worker] for worker in found}

    def _bar(self, role: WorkerRole) -> Row:
        return np.array([0.0 if worker.info.role.can(role) else INFINITE for worker in self.workers])

    def _first(self, role: WorkerRole) -> Worker | None:
        return next((worker for worker in self.workers if worker.info.role.can(role)), None)

    def prefill_costs(self, own: float, weight: float) -> Row:
        """`Worker.prefill_cost` of each, whether it prefills or not."""
        costs: Row = own * self._overtaken_seconds
        np.minimum(costs, self._prefill_seconds, out=costs)
        costs += self._pressure_seconds
        costs += weight * self._token_seconds
        return costs

    def decode_costs(self, own: int) -> Row:
        """Of a new sequence with so many tokens, on each."""
        costs: Row = own * self._decode_token_seconds
        costs += self._decode_seconds
        return costs
