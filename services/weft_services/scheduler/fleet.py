"""Who is live, what it last said, and how fast it has shown itself to be. Chooses nothing, books nothing."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from weft.errors import Incompatible
from weft.metrics import WORKERS
from weft_services.scheduler.state import Load, Worker, WorkerInfo, WorkerReport

logger = logging.getLogger(__name__)
# weight of the newest measurement in a rate
NEWEST_SHARE = 0.2
# reports that arrive in a bunch measure nothing
MIN_MEASURE_SECONDS = 0.05
# a worker that a request has just failed on is left alone for so long, if there is another
SUSPECT_SECONDS = 2.0
# models without workers remembered, so that "all its workers are gone" differs from "no such model"
MAX_MODELS = 1024


class Fleet:
    """The live workers. `silence_seconds` without a report and a worker is gone."""

    def __init__(self, silence_seconds: float) -> None:
        self._silence_seconds = silence_seconds
        self._workers: dict[str, Worker] = {}
        self._models: dict[str, list[Worker]] = {}

    @property
    def models(self) -> Mapping[str, Collection[Worker]]:
        """Every model served so far, and the workers that serve it now."""
        return self._models

    def workers(self) -> list[Worker]:
        """All live workers, sorted by id."""
        return [self._workers[worker_id] for worker_id in sorted(self._workers)]

    def join(self, info: WorkerInfo, now: float) -> tuple[Worker, Worker | None]:
        """A worker is live from here on. Returns it, and the one of the same id that it replaces."""
        replaced = self._workers.get(info.address.worker_id)
        if replaced is not None:
            self.leave(replaced, "replaced")
        worker = Worker(info, reported_at=now)
        self._workers[worker.worker_id] = worker
        self._models.setdefault(info.model, []).append(worker)
        if len(self._models) > MAX_MODELS:
            self._models = {model: workers for model, workers in self._models.items() if workers}
        WORKERS.labels(info.role).inc()
        logger.info(
            "worker joined id=%s role=%s model=%s at=%s", worker.worker_id, info.role, info.model, info.address.address
        )
        return worker, replaced

    def leave(self, worker: Worker, why: str) -> bool:
        """The worker is gone; False when it was already. A successor of the same id is not touched."""
        if self._workers.get(worker.worker_id) is not worker:
            return False
        del self._workers[worker.worker_id]
        self._models[worker.info.model].remove(worker)
        WORKERS.labels(worker.info.role).dec()
        logger.info("worker left id=%s reason=%s", worker.worker_id, why)
        return True

    def report(self, worker: Worker, report: WorkerReport, now: float) -> None:
        """Take a worker's own word. Raises Incompatible when it is not a member any more: another has its id."""
        if self._workers.get(worker.worker_id) is not worker:
            raise Incompatible(f"worker {worker.worker_id} has been replaced or given up; join again")
        if worker.num_reports > 0:
            _measure(worker, report, now - worker.reported_at)
        if report.ready != worker.report.ready:
            logger.info("worker %s id=%s", "ready" if report.ready else "not ready", worker.worker_id)
        if not report.is_idle:
            worker.idle_since = None
        elif worker.idle_since is None:
            worker.idle_since = now
        worker.report, worker.reported_at = report, now
        worker.num_reports += 1
        worker.fresh = Load()

    def suspect(self, worker_id: str, now: float) -> None:
        """A request has failed on it."""
        if (worker := self._workers.get(worker_id)) is not None:
            worker.suspect_until = now + SUSPECT_SECONDS

    def silent(self, now: float) -> list[Worker]:
        """Workers that have not reported for too long."""
        return [worker for worker in self._workers.values() if now - worker.reported_at > self._silence_seconds]


def _measure(worker: Worker, report: WorkerReport, seconds: float) -> None:
    """Update the rates from two reports in a row. Only time in which the worker had work says how fast it is."""
    before = worker.report
    if seconds < MIN_MEASURE_SECONDS:
        return
    if before.queued_prefill_tokens > 0 and report.queued_prefill_tokens > 0:
        computed = report.computed_prompt_tokens - before.computed_prompt_tokens
        worker.prefill_rate = _blend(worker.prefill_rate, computed / seconds)
    if before.num_running > 0 and report.num_running > 0:
        generated = report.generated_tokens - before.generated_tokens
        running = (before.num_running + report.num_running) / 2
        worker.decode_rate = _blend(worker.decode_rate, generated / seconds / running)


def _blend(old: float | None, new: float) -> float | None:
    if new <= 0:
        return old
    return new if old is None else old + NEWEST_SHARE * (new - old)
