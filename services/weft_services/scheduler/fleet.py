"""The live workers and their latest reports, the connected gateways, and the workers that are loading.

Chooses no worker and books nothing; the caller passes the clock.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from statistics import fmean

from weft.errors import Incompatible, InvalidRequest, NotFound, Overloaded
from weft.fleet_types import LoadingWorker, WorkerHello, WorkerReport
from weft.metrics import READY_WORKERS, ROLE_CHANGE_TIMEOUTS, WORKERS
from weft.request import WorkerRole
from weft_services.scheduler.fleet_state import NEVER, ModelWorkers, ReservedLoad, Worker, measure_speed, update_rates

# a stream that broke is back sooner, if its gateway lives
ABSENT_SECONDS = 10.0


class GatewayRegistry:
    """By the names that they give themselves, new at every start."""

    def __init__(self) -> None:
        self._num_streams: Counter[str] = Counter()
        self._left_at: dict[str, float] = {}

    def connected(self, gateway_id: str) -> None:
        """It holds a stream more."""
        self._num_streams[gateway_id] += 1
        self._left_at.pop(gateway_id, None)

    def disconnected(self, gateway_id: str, now: float) -> None:
        """It holds one less; a broken stream may end after the next has begun."""
        self._num_streams[gateway_id] -= 1
        if not self._num_streams[gateway_id]:
            del self._num_streams[gateway_id]
            self._left_at[gateway_id] = now

    def take_absent(self, now: float) -> set[str]:
        """Who has held none for too long; each is named once."""
        gone = {gateway_id for gateway_id, at in self._left_at.items() if now - at > ABSENT_SECONDS}
        for gateway_id in gone:
            del self._left_at[gateway_id]
        return gone


MAX_ARRIVALS = 1024


class Announcement:
    """One stream of a worker; of two with the same id the later one counts."""

    def __init__(self, began_at: float) -> None:
        self.began_at = began_at
        self.arrival: LoadingWorker | None = None


class LoadingWorkers:
    """By worker id."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._announcements: dict[str, Announcement] = {}

    def begin(self) -> Announcement:
        """A stream that has said nothing yet."""
        return Announcement(self._clock())

    def update(self, announcement: Announcement, arrival: LoadingWorker) -> None:
        """Raises Overloaded where more come than anybody would read of."""
        if announcement.arrival is not None and announcement.arrival.worker_id != arrival.worker_id:
            self.end(announcement)
        if arrival.worker_id not in self._announcements and len(self._announcements) >= MAX_ARRIVALS:
            raise Overloaded(f"{MAX_ARRIVALS} workers are announced already")
        announcement.arrival = arrival
        self._announcements[arrival.worker_id] = announcement

    def end(self, announcement: Announcement) -> None:
        """It has joined, or is gone."""
        if (told := announcement.arrival) is not None and self._announcements.get(told.worker_id) is announcement:
            del self._announcements[told.worker_id]

    def is_loading(self, model: str) -> bool:
        """Somebody loads that one."""
        return any(each.arrival and each.arrival.model == model for each in self._announcements.values())

    def loading(self) -> list[tuple[LoadingWorker, float]]:
        """Each with the seconds since it was first announced, sorted by id."""
        now = self._clock()
        found = ((each.arrival, now - each.began_at) for each in self._announcements.values())
        return sorted(((arrival, seconds) for arrival, seconds in found if arrival), key=lambda each: each[0].worker_id)


logger = logging.getLogger(__name__)
# a worker that a request has just failed on is left alone for so long, if there is another
SUSPECT_SECONDS = 2.0
MAX_SUSPECT_SECONDS = 60.0
MAX_COUNTED_FAULTS = 16
# models without workers remembered, so that "all its workers are gone" differs from "no such model"
MAX_MODELS = 1024
# a worker that comes back within this time of its last report is asked again to drain, if it had not granted it; later
# somebody else may have asked it for something else. So many of them are remembered
DRAIN_REQUEST_SECONDS = 30.0
MAX_DRAIN_REQUESTS = 1024
# a worker plays the role it is asked for as soon as it has heard of it; one that does not for so long will not
ROLE_CHANGE_SECONDS = 30.0
# that a model has no worker is told for so long after it had one: then it is not missed any more
READY_METRIC_SECONDS = 3600.0
# a role that had a ready worker within this time is expected to have one again in a moment, and so is a size
RETURN_SECONDS = 10.0
# kept a second: what was dispatched counts for some minutes, how busy the fleet was for some seconds
DISPATCHED_DECAY = 0.995
NEWEST_SHARE = 0.1


class Fleet:
    """The live workers. `silence_seconds` without a report and a worker is gone."""

    def __init__(self, silence_seconds: float) -> None:
        self._silence_seconds = silence_seconds
        self._workers: dict[str, Worker] = {}
        self._models: dict[str, ModelWorkers] = {}
        self._drain_requests: dict[
            tuple[str, str], tuple[bool, float]
        ] = {}  # to drain or not; when such a start last reported
        self._role_requested_at: dict[tuple[Worker, WorkerRole], float] = {}  # to play a role
        self._ready_at: dict[tuple[str, WorkerRole], float] = {}  # when a worker of the role last said so, or was full
        # by model the longest prompts of those who left of late, and when they last reported
        self._left: dict[str, list[tuple[int, float]]] = {}

    @property
    def models(self) -> Mapping[str, ModelWorkers]:
        """Every model served so far, and the workers that serve it now."""
        return self._models

    def workers(self) -> list[Worker]:
        """All live workers, sorted by id."""
        return [self._workers[worker_id] for worker_id in sorted(self._workers)]

    def find(self, worker_id: str, boot_id: str) -> Worker | None:
        """That start of the worker, if it is live."""
        worker = self._workers.get(worker_id)
        return worker if worker is not None and worker.info.address.boot_id == boot_id else None

    def join(self, info: WorkerHello, now: float) -> tuple[Worker, Worker | None]:
        """A worker is live from here on. Returns it, and the one of the same id that it replaces."""
        replaced = self._workers.get(info.address.worker_id)
        if replaced is not None:
            logger.warning(
                "worker %s joins from %s before %s left: if both live, each needs a WEFT_WORKER_ID of its own",
                *(info.address.worker_id, info.address.address, replaced.info.address.address),
            )
            self.leave(replaced, "replaced")
        worker = Worker(info, reported_at=now)
        wish, reported_at = self._drain_requests.pop(_boot_of(info), (None, NEVER))
        if now - reported_at < DRAIN_REQUEST_SECONDS:
            worker.drain_requested = wish
        self._workers[worker.worker_id] = worker
        members = self._models.get(info.model) or ModelWorkers()
        peers = [peer.dispatched_tokens for peer in members.workers if peer.info.role is info.role]
        worker.dispatched_tokens = fmean(peers) if peers else 0.0
        self._models[info.model] = members.with_workers([*members.workers, worker])
        update_rates(self._models[info.model])
        if len(self._models) > MAX_MODELS:
            self._forget_models()
        WORKERS.labels(info.role).inc()
        logger.info(
            "worker joined id=%s role=%s model=%s at=%s", worker.worker_id, info.role, info.model, info.address.address
        )
        return worker, replaced

    def _forget_models(self) -> None:
        for model in [model for model, members in self._models.items() if not members.workers]:
            del self._models[model]
            self._left.pop(model, None)
            for role in (WorkerRole.PREFILL, WorkerRole.DECODE):
                self._ready_at.pop((model, role), None)
                _remove_ready_metric(model, role)

    def leave(self, worker: Worker, why: str) -> bool:
        """The worker is gone; False when it was already. A successor of the same id is not touched. Should the same
        start of it come back soon, it is asked again to drain if it has not granted that: it may never have heard of
        it. Not so to park or to play another role, which may not be granted any more by then."""
        if self._workers.get(worker.worker_id) is not worker:
            return False
        if worker.drain_requested is not None:
            self._drain_requests[_boot_of(worker.info)] = worker.drain_requested, worker.reported_at
            if len(self._drain_requests) > MAX_DRAIN_REQUESTS:
                self._drain_requests.pop(next(iter(self._drain_requests)))
        del self._workers[worker.worker_id]
        left = [each for each in self._left.get(worker.info.model, ()) if _is_recent(each[1], worker.reported_at)]
        self._left[worker.info.model] = [*left, (worker.longest_prompt, worker.reported_at)]
        members = self._models[worker.info.model]
        remaining = [other for other in members.workers if other is not worker]
        self._models[worker.info.model] = members.with_workers(remaining)
        WORKERS.labels(worker.info.role).dec()
        logger.info("worker left id=%s reason=%s", worker.worker_id, why)
        return True

    def report(self, worker: Worker, report: WorkerReport, now: float) -> None:
        """Take a worker's own word. Raises Incompatible when it is not a member any more: another has its id."""
        if self._workers.get(worker.worker_id) is not worker:
            raise Incompatible(f"worker {worker.worker_id} has been replaced or given up; join again")
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
            worker.drain_requested = None  # granted
        if worker.park_requested == report.is_parked:
            worker.park_requested = None
        if report.role not in (None, worker.info.role):
            self._change_role(worker, report.role)
        if worker.role_requested is worker.info.role:
            worker.role_requested, worker.num_declined_roles = None, 0
        self._note_ready(worker, now)
        worker.refresh()

    def _note_ready(self, worker: Worker, now: float) -> None:
        for role in (WorkerRole.PREFILL, WorkerRole.DECODE) if takes_requests(worker) else ():
            if worker.info.role.can(role):
                self._ready_at[worker.info.model, role] = now

    def was_ready_recently(self, model: str, role: WorkerRole, now: float) -> bool:
        """Had the role a ready worker a moment ago."""
        return _is_recent(self._ready_at.get((model, role), NEVER), now)

    def has_lost_recently(self, model: str, prompt_tokens: int, now: float) -> bool:
        """Has a worker that takes so long a prompt left a moment ago: it may be back soon, started anew."""
        left = self._left.get(model, ())
        return any(prompt_tokens <= longest and _is_recent(reported_at, now) for longest, reported_at in left)

    def refresh(self, now: float) -> None:
        """What the policy and operators know of the fleet as a whole; to be called once a second."""
        for members in self._models.values():
            for worker in members.workers:
                worker.speed.fade()
                worker.dispatched_tokens *= DISPATCHED_DECAY
            update_rates(members)
            busy = [min(worker.prefill_tokens, 1) for worker in members.prefills if takes_requests(worker)]
            members.utilization += NEWEST_SHARE * ((fmean(busy) if busy else 0.0) - members.utilization)
        self._publish_ready(now)
        self._expire_role_requests(now)

    def _expire_role_requests(self, now: float) -> None:
        """One that is asked for, and is not played, is in the way of all others that would help."""
        asked = [
            (worker, worker.role_requested) for worker in self._workers.values() if worker.role_requested is not None
        ]
        self._role_requested_at = {each: self._role_requested_at.get(each, now) for each in asked}
        for worker, role in [each for each, at in self._role_requested_at.items() if now - at >= ROLE_CHANGE_SECONDS]:
            logger.warning(
                "worker does not play %s, asked for %.0f s id=%s", role, ROLE_CHANGE_SECONDS, worker.worker_id
            )
            worker.role_requested, worker.num_declined_roles = None, worker.num_declined_roles + 1
            del self._role_requested_at[worker, role]
            ROLE_CHANGE_TIMEOUTS.inc()

    def _publish_ready(self, now: float) -> None:
        for model, members in self._models.items():
            ready = [worker.info.role for worker in members.workers if takes_requests(worker)]
            for role in (WorkerRole.PREFILL, WorkerRole.DECODE):
                if members.workers or now - self._ready_at.get((model, role), NEVER) < READY_METRIC_SECONDS:
                    READY_WORKERS.labels(model, role).set(sum(each.can(role) for each in ready))
                else:
                    _remove_ready_metric(model, role)

    def mark_suspect(self, worker_id: str, now: float) -> None:
        """A request has failed on it: others go elsewhere for a while, for longer each time in a row. What fails while
        they do was there before, and died of the same."""
        worker = self._workers.get(worker_id)
        if worker is not None and (now >= worker.suspect_until or worker.is_probed):
            worker.num_faults = min(worker.num_faults + 1, MAX_COUNTED_FAULTS)
            worker.suspect_until, worker.is_probed = now + _suspect_pause(worker.num_faults), False

    def begin_probe(self, worker: Worker, now: float) -> None:
        """A request has been placed there. If that is the first after a fault, the others wait for what becomes of it,
        and after a while for what becomes of the next."""
        if NEVER < worker.suspect_until <= now:
            worker.suspect_until, worker.is_probed = now + _suspect_pause(worker.num_faults), True

    def end_probe(self, worker: Worker) -> None:
        """A request has had its first token there: where that was waited for, the others may come. As with `trust` it
        says nothing for who has been started anew under that name since."""
        if worker.is_probed:
            worker.suspect_until, worker.is_probed = NEVER, False

    def mark_healthy(self, worker: Worker) -> None:
        """A request has ended well on it: it is as good as any."""
        worker.num_faults, worker.suspect_until, worker.is_probed = 0, NEVER, False

    def drain(self, worker_id: str, wish: bool) -> None:
        """Ask a worker to take no new work, or to take it again. Raises NotFound when no such worker is live; then what
        it was asked before is forgotten, too."""
        self._drain_requests = {start: gone for start, gone in self._drain_requests.items() if start[0] != worker_id}
        worker = self._live(worker_id)
        worker.drain_requested = wish
        worker.refresh()

    def park(self, worker_id: str, wish: bool, even_last: bool = False) -> None:
        """Ask a worker to give back its memory, or to load again. Raises NotFound, or InvalidRequest for one without
        which a role would have no able worker, unless `even_last`."""
        worker = self._live(worker_id)
        for needed in (WorkerRole.PREFILL, WorkerRole.DECODE) if wish and not even_last else ():
            if target_role(worker).can(needed):
                self._check_others(worker, needed)
        worker.park_requested = wish
        worker.refresh()

    def _live(self, worker_id: str) -> Worker:
        if (worker := self._workers.get(worker_id)) is None:
            raise NotFound(f"no worker {worker_id!r} is live")
        return worker

    def set_role(self, worker_id: str, role: WorkerRole) -> None:
        """Ask a worker to play another role. Raises NotFound, or InvalidRequest where it cannot or must not."""
        worker = self._live(worker_id)
        if not worker.info.can_change_role:
            raise InvalidRequest(f"{worker_id} runs as {worker.info.role} only", "worker_id")
        for needed in (WorkerRole.PREFILL, WorkerRole.DECODE):
            if target_role(worker).can(needed) and not role.can(needed):
                self._check_others(worker, needed)
        worker.role_requested = role

    def _check_others(self, worker: Worker, needed: WorkerRole) -> None:
        """Raises InvalidRequest when nobody else serves its model in that role."""
        others = (
            each for each in self._models[worker.info.model].workers if each is not worker and takes_requests(each)
        )
        if not any(target_role(each).can(needed) for each in others):
            what = f"the last {needed} worker of {worker.info.model!r} that takes requests"
            raise InvalidRequest(f"{worker.worker_id} is {what}", "worker_id")

    def _change_role(self, worker: Worker, role: WorkerRole) -> None:
        """The worker says that it plays another role; what is booked on it stays."""
        logger.info("worker plays %s id=%s before=%s", role, worker.worker_id, worker.info.role)
        WORKERS.labels(worker.info.role).dec()
        WORKERS.labels(role).inc()
        worker.info = replace(worker.info, role=role)
        members = self._models[worker.info.model]
        self._models[worker.info.model] = members.with_workers(members.workers)

    def silent_workers(self, now: float) -> list[Worker]:
        """Workers that have not reported for too long."""
        return [worker for worker in self._workers.values() if now - worker.reported_at > self._silence_seconds]


def _remove_ready_metric(model: str, role: WorkerRole) -> None:
    with suppress(KeyError):
        READY_WORKERS.remove(model, role)


def _boot_of(info: WorkerHello) -> tuple[str, str]:
    return info.address.worker_id, info.address.boot_id


def _is_recent(then: float, now: float) -> bool:
    return now - then < RETURN_SECONDS


def _suspect_pause(num_faults: int) -> float:
    """How long nobody goes there, after so many faults in a row."""
    return min(SUSPECT_SECONDS * 2.0 ** (num_faults - 1), MAX_SUSPECT_SECONDS)


def takes_requests(worker: Worker) -> bool:
    """It takes requests, or would if its pool were not full, and nobody has asked it to stop that."""
    report = worker.report
    is_leaving = report.is_draining or report.is_parked or True in (worker.drain_requested, worker.park_requested)
    return (report.ready or report.is_full) and not is_leaving


def target_role(worker: Worker) -> WorkerRole:
    """Its role, or the one it has been asked to take."""
    return worker.role_requested or worker.info.role
