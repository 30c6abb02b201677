"""The live workers and their latest reports, the connected gateways, and the workers that are loading.

Chooses no worker and books nothing; the caller passes the clock.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from statistics import fmean

from weft.errors import Incompatible, InvalidRequest, NotFound, Overloaded
from weft.fleet_types import LoadingWorker, WorkerHello, WorkerReport
from weft.metrics import READY_WORKERS, ROLE_CHANGE_TIMEOUTS, WORKERS
from weft.request import WorkerRole
from weft_services.scheduler.fleet_state import NEVER, ModelWorkers, ReservedLoad, Worker, measure_speed, update_rates

# a live gateway reopens a broken stream sooner than this
ABSENT_SECONDS = 10.0


class GatewayRegistry:
    """Gateways by their id, which is new at every start: how many streams each holds."""

    def __init__(self) -> None:
        self._num_streams: Counter[str] = Counter()
        self._left_at: dict[str, float] = {}

    def connected(self, gateway_id: str) -> None:
        """Count a new stream of the gateway."""
        self._num_streams[gateway_id] += 1
        self._left_at.pop(gateway_id, None)

    def disconnected(self, gateway_id: str, now: float) -> None:
        """Count a closed stream. A broken one may end after its successor has begun."""
        self._num_streams[gateway_id] -= 1
        if not self._num_streams[gateway_id]:
            del self._num_streams[gateway_id]
            self._left_at[gateway_id] = now

    def take_absent(self, now: float) -> set[str]:
        """Return the gateways without a stream for too long, each once."""
        gone = {gateway_id for gateway_id, at in self._left_at.items() if now - at > ABSENT_SECONDS}
        for gateway_id in gone:
            del self._left_at[gateway_id]
        return gone


MAX_ARRIVALS = 1024


class Announcement:
    """One announcement stream; of two with the same worker id the later one counts."""

    def __init__(self, began_at: float) -> None:
        self.began_at = began_at
        self.arrival: LoadingWorker | None = None


class LoadingWorkers:
    """Workers that load their model and have not joined, by id. They are shown, not used for placement."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._announcements: dict[str, Announcement] = {}

    def begin(self) -> Announcement:
        """Register a stream that has not sent anything yet."""
        return Announcement(self._clock())

    def update(self, announcement: Announcement, arrival: LoadingWorker) -> None:
        """Record progress. Raises Overloaded beyond MAX_ARRIVALS workers."""
        if announcement.arrival is not None and announcement.arrival.worker_id != arrival.worker_id:
            self.end(announcement)
        if arrival.worker_id not in self._announcements and len(self._announcements) >= MAX_ARRIVALS:
            raise Overloaded(f"{MAX_ARRIVALS} workers are loading already; retry later")
        announcement.arrival = arrival
        self._announcements[arrival.worker_id] = announcement

    def end(self, announcement: Announcement) -> None:
        """Remove a worker that has joined or is gone."""
        if (loading := announcement.arrival) is not None and self._announcements.get(loading.worker_id) is announcement:
            del self._announcements[loading.worker_id]

    def is_loading(self, model: str) -> bool:
        """Return whether a worker loads this model."""
        return any(each.arrival and each.arrival.model == model for each in self._announcements.values())

    def loading(self) -> list[tuple[LoadingWorker, float]]:
        """Return each worker with the seconds since its first announcement, sorted by id."""
        now = self._clock()
        found = ((each.arrival, now - each.began_at) for each in self._announcements.values())
        return sorted(((arrival, seconds) for arrival, seconds in found if arrival), key=lambda each: each[0].worker_id)


logger = logging.getLogger(__name__)
# remembered models without workers, so that "no worker is live" differs from "no such model"
MAX_MODELS = 1024
# A drain request is repeated to a worker that returns within this time of its last report. Later an operator may have
# decided otherwise.
DRAIN_REQUEST_SECONDS = 30.0
MAX_DRAIN_REQUESTS = 1024
# a worker changes its role with its next report; after this time it counts as declined
ROLE_CHANGE_SECONDS = 30.0
# the readiness metric of a model stays at 0 for this time after its last ready worker
READY_METRIC_SECONDS = 3600.0
# a role or prompt size that had a ready worker within this time is expected back
RETURN_SECONDS = 10.0
# per second: dispatched tokens decay over minutes, utilization over seconds
DISPATCHED_DECAY = 0.995
NEWEST_SHARE = 0.1


class Fleet:
    """The live workers. A worker without a report for `silence_seconds` is gone."""

    def __init__(self, silence_seconds: float) -> None:
        self._silence_seconds = silence_seconds
        self._workers: dict[str, Worker] = {}
        # all models served so far, with their live workers; others only read it
        self.models: dict[str, ModelWorkers] = {}
        self._drain_requests: dict[
            tuple[str, str], tuple[bool, float]
        ] = {}  # to drain or not, and when that boot last reported
        self._role_requested_at: dict[tuple[Worker, WorkerRole], float] = {}  # when it was asked to play a role
        self._ready_at: dict[tuple[str, WorkerRole], float] = {}  # last time a worker of the role was ready or full
        # by model: longest prompt and last report of workers that left recently
        self._left: dict[str, list[tuple[int, float]]] = {}

    def workers(self) -> list[Worker]:
        """Return all live workers, sorted by id."""
        return [self._workers[worker_id] for worker_id in sorted(self._workers)]

    def find(self, worker_id: str, boot_id: str) -> Worker | None:
        """Return that boot of the worker if it is live."""
        worker = self._workers.get(worker_id)
        return worker if worker is not None and worker.info.address.boot_id == boot_id else None

    def join(self, info: WorkerHello, now: float) -> tuple[Worker, Worker | None]:
        """Add a worker. Return it and the worker of the same id that it replaces."""
        replaced = self._workers.get(info.address.worker_id)
        if replaced is not None:
            logger.warning(
                "worker id=%s replaced new=%s old=%s; if both run, set a different WEFT_WORKER_ID for each",
                *(info.address.worker_id, info.address.address, replaced.info.address.address),
            )
            self.leave(replaced, "replaced")
        worker = Worker(info, reported_at=now)
        wish, reported_at = self._drain_requests.pop(_boot_of(info), (None, NEVER))
        if now - reported_at < DRAIN_REQUEST_SECONDS:
            worker.drain_requested = wish
        self._workers[worker.worker_id] = worker
        members = self.models.get(info.model) or ModelWorkers()
        peers = [peer.dispatched_tokens for peer in members.workers if peer.info.role is info.role]
        worker.dispatched_tokens = fmean(peers) if peers else 0.0
        self.models[info.model] = members.with_workers([*members.workers, worker])
        update_rates(self.models[info.model])
        if len(self.models) > MAX_MODELS:
            self._forget_models()
        WORKERS.labels(info.role).inc()
        logger.info(
            "worker joined id=%s role=%s model=%s at=%s", worker.worker_id, info.role, info.model, info.address.address
        )
        return worker, replaced

    def _forget_models(self) -> None:
        for model in [model for model, members in self.models.items() if not members.workers]:
            del self.models[model]
            self._left.pop(model, None)
            for role in (WorkerRole.PREFILL, WorkerRole.DECODE):
                self._ready_at.pop((model, role), None)
                _remove_ready_metric(model, role)

    def leave(self, worker: Worker, why: str) -> bool:
        """Remove a worker; False if it is gone already. A successor of the same id stays.

        If the same boot comes back soon, a pending drain request is repeated: the worker may not have received it.
        Sleep and role requests are not, because they may no longer be allowed.
        """
        if self._workers.get(worker.worker_id) is not worker:
            return False
        if worker.drain_requested is not None:
            self._drain_requests[_boot_of(worker.info)] = worker.drain_requested, worker.reported_at
            if len(self._drain_requests) > MAX_DRAIN_REQUESTS:
                self._drain_requests.pop(next(iter(self._drain_requests)))
        del self._workers[worker.worker_id]
        left = [each for each in self._left.get(worker.info.model, ()) if _is_recent(each[1], worker.reported_at)]
        self._left[worker.info.model] = [*left, (worker.longest_prompt, worker.reported_at)]
        members = self.models[worker.info.model]
        remaining = [other for other in members.workers if other is not worker]
        self.models[worker.info.model] = members.with_workers(remaining)
        WORKERS.labels(worker.info.role).dec()
        logger.info("worker left id=%s reason=%s", worker.worker_id, why)
        return True

    def report(self, worker: Worker, report: WorkerReport, now: float) -> None:
        """Apply a report. Raises Incompatible if another worker has taken the id."""
        if self._workers.get(worker.worker_id) is not worker:
            raise Incompatible(f"worker {worker.worker_id} is no longer a member; join again")
        if worker.num_reports > 0:
            measure_speed(worker, report)
        if report.ready != worker.report.ready:
            logger.info("worker %s id=%s", "ready" if report.ready else "not ready", worker.worker_id)
        if not report.is_idle:
            worker.idle_since = None
        elif worker.idle_since is None:
            worker.idle_since = now
        worker.report, worker.reported_at = report, now
        worker.num_reports += 1
        worker.unreported, worker.released = ReservedLoad(), ReservedLoad()
        if worker.drain_requested == report.is_draining:
            worker.drain_requested = None  # done
        if worker.sleep_requested == report.is_asleep:
            worker.sleep_requested = None
        if report.role not in (None, worker.info.role):
            self._change_role(worker, report.role)
        if worker.role_requested is worker.info.role:
            worker.role_requested, worker.num_declined_roles = None, 0
        self._note_ready(worker, now)
        worker.refresh()

    def _note_ready(self, worker: Worker, now: float) -> None:
        for role in (WorkerRole.PREFILL, WorkerRole.DECODE) if worker.takes_requests else ():
            if worker.info.role.can(role):
                self._ready_at[worker.info.model, role] = now

    def was_ready_recently(self, model: str, role: WorkerRole, now: float) -> bool:
        """Return whether the role had a ready worker within RETURN_SECONDS."""
        return _is_recent(self._ready_at.get((model, role), NEVER), now)

    def has_lost_recently(self, model: str, prompt_tokens: int, now: float) -> bool:
        """Return whether a worker that fits the prompt left within RETURN_SECONDS; it may restart soon."""
        left = self._left.get(model, ())
        return any(prompt_tokens <= longest and _is_recent(reported_at, now) for longest, reported_at in left)

    def refresh(self, now: float) -> None:
        """Update speeds, utilization and metrics; call once a second."""
        for members in self.models.values():
            for worker in members.workers:
                worker.speed.fade()
                worker.dispatched_tokens *= DISPATCHED_DECAY
            update_rates(members)
            busy = [min(worker.prefill_tokens, 1) for worker in members.prefills if worker.takes_requests]
            members.utilization += NEWEST_SHARE * ((fmean(busy) if busy else 0.0) - members.utilization)
        self._publish_ready(now)
        self._expire_role_requests(now)

    def _expire_role_requests(self, now: float) -> None:
        """Drop role requests that the worker ignored: they block other changes that would help."""
        asked = [
            (worker, worker.role_requested) for worker in self._workers.values() if worker.role_requested is not None
        ]
        self._role_requested_at = {each: self._role_requested_at.get(each, now) for each in asked}
        for worker, role in [each for each, at in self._role_requested_at.items() if now - at >= ROLE_CHANGE_SECONDS]:
            logger.warning(
                "role change timed out role=%s seconds=%.0f id=%s", role, ROLE_CHANGE_SECONDS, worker.worker_id
            )
            worker.role_requested, worker.num_declined_roles = None, worker.num_declined_roles + 1
            del self._role_requested_at[worker, role]
            ROLE_CHANGE_TIMEOUTS.inc()

    def _publish_ready(self, now: float) -> None:
        for model, members in self.models.items():
            ready = [worker.info.role for worker in members.workers if worker.takes_requests]
            for role in (WorkerRole.PREFILL, WorkerRole.DECODE):
                if members.workers or now - self._ready_at.get((model, role), NEVER) < READY_METRIC_SECONDS:
                    READY_WORKERS.labels(model, role).set(sum(each.can(role) for each in ready))
                else:
                    _remove_ready_metric(model, role)

    def mark_suspect(self, worker_id: str, now: float) -> None:
        """Avoid a worker after a failed request, if it is live."""
        if (worker := self._workers.get(worker_id)) is not None:
            worker.mark_suspect(now)

    def drain(self, worker_id: str, wish: bool) -> None:
        """Ask a worker to stop or resume taking new work.

        Raises NotFound if it is not live; an earlier request for its id is forgotten too.
        """
        self._drain_requests = {start: gone for start, gone in self._drain_requests.items() if start[0] != worker_id}
        worker = self._live(worker_id)
        worker.drain_requested = wish
        worker.refresh()

    def put_to_sleep(self, worker_id: str, wish: bool, even_last: bool = False) -> None:
        """Ask a worker to release its memory, or to load again.

        Raises NotFound. Raises InvalidRequest if it is the last able worker of a role, unless `even_last`.
        """
        worker = self._live(worker_id)
        for needed in (WorkerRole.PREFILL, WorkerRole.DECODE) if wish and not even_last else ():
            if worker.target_role.can(needed):
                self._check_others(worker, needed)
        worker.sleep_requested = wish
        worker.refresh()

    def _live(self, worker_id: str) -> Worker:
        if (worker := self._workers.get(worker_id)) is None:
            raise NotFound(f"no worker {worker_id!r} is live")
        return worker

    def set_role(self, worker_id: str, role: WorkerRole) -> None:
        """Ask a worker to change its role. Raises NotFound, or InvalidRequest if it cannot or must not."""
        worker = self._live(worker_id)
        if not worker.info.can_change_role:
            raise InvalidRequest(f"{worker_id} can only run as {worker.info.role}", "worker_id")
        for needed in (WorkerRole.PREFILL, WorkerRole.DECODE):
            if worker.target_role.can(needed) and not role.can(needed):
                self._check_others(worker, needed)
        worker.role_requested = role

    def _check_others(self, worker: Worker, needed: WorkerRole) -> None:
        """Raise InvalidRequest if no other worker serves the model in that role."""
        others = (each for each in self.models[worker.info.model].workers if each is not worker and each.takes_requests)
        if not any(each.target_role.can(needed) for each in others):
            what = f"the last {needed} worker of {worker.info.model!r} that takes requests"
            raise InvalidRequest(f"{worker.worker_id} is {what}", "worker_id")

    def _change_role(self, worker: Worker, role: WorkerRole) -> None:
        """Apply the role that the worker reports; its reservations stay."""
        logger.info("worker role changed role=%s id=%s before=%s", role, worker.worker_id, worker.info.role)
        WORKERS.labels(worker.info.role).dec()
        WORKERS.labels(role).inc()
        worker.info = replace(worker.info, role=role)
        members = self.models[worker.info.model]
        self.models[worker.info.model] = members.with_workers(members.workers)

    def silent_workers(self, now: float) -> list[Worker]:
        """Return the workers that have not reported for too long."""
        return [worker for worker in self._workers.values() if now - worker.reported_at > self._silence_seconds]


def _remove_ready_metric(model: str, role: WorkerRole) -> None:
    with suppress(KeyError):
        READY_WORKERS.remove(model, role)


def _boot_of(info: WorkerHello) -> tuple[str, str]:
    return info.address.worker_id, info.address.boot_id


def _is_recent(then: float, now: float) -> bool:
    return now - then < RETURN_SECONDS
