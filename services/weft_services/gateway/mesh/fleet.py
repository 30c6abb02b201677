"""The fleet as the scheduler reports it: polled here, and broadcast to subscribers.

Both the number of subscribers and their unread items are bounded.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from weft.errors import Overloaded, PeerLost, WeftError
from weft.fleet_types import LoadingWorker, WorkerStatus
from weft.request import WorkerRole
from weft_services.gateway.mesh.scheduler_client import FleetReport, SchedulerClient

MAX_SUBSCRIBERS = 64
MAX_UNREAD = 64
ItemT = TypeVar("ItemT")


class Subscription(Generic[ItemT]):
    """One subscriber's unread items. When full, the oldest is dropped, because newer items supersede it."""

    def __init__(self) -> None:
        self._items: asyncio.Queue[ItemT | None] = asyncio.Queue(MAX_UNREAD)

    def put(self, item: ItemT | None) -> None:
        if self._items.full():
            self._items.get_nowait()
        self._items.put_nowait(item)

    async def next(self) -> ItemT | None:
        """Return the next item; None after the last."""
        return await self._items.get()


class Broadcaster(Generic[ItemT]):
    """Sends every item to every subscriber."""

    def __init__(self) -> None:
        self._subscriptions: set[Subscription[ItemT]] = set()
        self._is_closed = False

    @property
    def has_subscribers(self) -> bool:
        return bool(self._subscriptions)

    def publish(self, item: ItemT) -> None:
        for listener in self._subscriptions:
            listener.put(item)

    @contextmanager
    def subscribed(self) -> Iterator[Subscription[ItemT]]:
        """Subscribe for the duration of the block. Raises Overloaded, or PeerLost once closed."""
        if self._is_closed:
            raise PeerLost("the gateway is shutting down")
        if len(self._subscriptions) >= MAX_SUBSCRIBERS:
            raise Overloaded(f"{MAX_SUBSCRIBERS} subscribers are connected already; retry later")
        listener = Subscription[ItemT]()
        self._subscriptions.add(listener)
        try:
            yield listener
        finally:
            self._subscriptions.discard(listener)

    def close(self) -> None:
        """End all subscriptions and accept no more."""
        self._is_closed = True
        for listener in self._subscriptions:
            listener.put(None)


logger = logging.getLogger(__name__)

POLL_INTERVAL_SECONDS = 1.0
UNREACHABLE = "the scheduler cannot be reached"


@dataclass(frozen=True, slots=True)
class HandOff:
    """A prompt's KV cache that moved from a prefill to a decode worker."""

    prefill_id: str
    decode_id: str
    size_bytes: int
    exposed_ms: int


@dataclass(frozen=True, slots=True)
class ModelFleet:
    """The workers of one model in the scheduler's latest answer.

    `unknown_reason` says why there is no such answer; None if there is one.
    """

    workers: tuple[WorkerStatus, ...] = ()
    unknown_reason: str | None = "the scheduler has not been asked yet"
    loading: tuple[LoadingWorker, ...] = ()

    @property
    def reasons(self) -> list[str]:
        """Why requests cannot be served now; empty if they can."""
        if self.unknown_reason is not None:
            return [self.unknown_reason]
        missing = []
        for role in (WorkerRole.DECODE, WorkerRole.PREFILL):
            able = [worker for worker in self.workers if worker.role.can(role)]
            if not any(worker.is_serving for worker in able):
                what = f"no {role} worker {'is ready' if able else 'has joined'}"
                coming = sum(worker.role.can(role) for worker in self.loading)
                missing.append(f"{what}, {coming} loading the model" if coming else what)
        return missing

    def serving(self, role: WorkerRole) -> frozenset[str]:
        """Ids of the workers that accept requests in a role."""
        return frozenset(w.address.worker_id for w in self.workers if w.role.can(role) and w.is_serving)

    @property
    def withdrawn(self) -> frozenset[str]:
        """Ids of the workers that an operator has drained or put to sleep."""
        return frozenset(w.address.worker_id for w in self.workers if w.report.is_draining or w.report.is_asleep)

    @property
    def block_tokens(self) -> int | None:
        """Tokens per KV block; None while no worker has joined."""
        return next((size for w in self.workers if (size := w.hello.fingerprint.block_tokens)), None)

    @property
    def max_context_tokens(self) -> int | None:
        """The smallest context limit among the workers; None while no worker has joined."""
        return min((size for w in self.workers if (size := w.hello.max_context_tokens)), default=None)

    @property
    def fingerprint(self) -> str | None:
        """OpenAI's system_fingerprint; it changes with the weights."""
        hashes = (worker.hello.fingerprint.weights_hash for worker in self.workers)
        return next((f"fp_{each[:12]}" for each in hashes if each), None)


def _of_model(model: str, report: FleetReport) -> ModelFleet:
    loading = tuple(worker for worker in report.loading if worker.model == model)
    return ModelFleet(tuple(worker for worker in report.workers if worker.model == model), None, loading)


@dataclass(frozen=True, slots=True)
class _LastServed:
    """When a model was last served, and by which workers in each role."""

    at: float = float("-inf")
    by: Mapping[WorkerRole, frozenset[str]] = field(default_factory=dict)


class FleetWatcher:
    """Polls the scheduler and publishes its answers.

    After a failed poll the last known workers stay, because requests need their limits. Transfer statistics are
    requested only while a subscriber exists. `report` is the latest answer, reduced to served models; `events`
    publishes reports and hand-offs.
    """

    def __init__(
        self, scheduler: SchedulerClient, models: Iterable[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self.report = FleetReport()
        self._has_hand_offs = False
        self.events = Broadcaster[FleetReport | HandOff]()
        self._fleets = {model: ModelFleet() for model in models}
        self._served = {model: _LastServed() for model in self._fleets}

    def of(self, model: str) -> ModelFleet:
        """Return the latest state of a served model's workers."""
        return self._fleets[model]

    def was_served_recently(self, model: str, seconds: float) -> bool:
        """True if the model was served within the last `seconds` and a worker may return by itself.

        That holds if every role still has a worker, or if a role lost one that no operator withdrew.
        """
        served, fleet = self._served[model], self._fleets[model]
        if self._clock() - served.at > seconds:
            return False
        missing = [before for role, before in served.by.items() if not fleet.serving(role)]
        return not missing or any(before - fleet.withdrawn for before in missing)

    @property
    def is_ready(self) -> bool:
        """True if at least one model can be served."""
        return any(not fleet.reasons for fleet in self._fleets.values())

    @property
    def reasons(self) -> list[str]:
        """Why models cannot be served now; prefixed with the model's name if there are several."""
        if len(self._fleets) == 1 or any(fleet.unknown_reason for fleet in self._fleets.values()):
            return next(iter(self._fleets.values())).reasons
        return [f"{model}: {reason}" for model, fleet in self._fleets.items() for reason in fleet.reasons]

    @property
    def boot_ids(self) -> list[str] | None:
        """Boot ids of all workers of served models; None while the scheduler is unreachable."""
        if any(fleet.unknown_reason for fleet in self._fleets.values()):
            return None
        return [worker.address.boot_id for fleet in self._fleets.values() for worker in fleet.workers]

    async def poll(self) -> None:
        """Poll once and publish the report. Never raises."""
        await self._refresh()
        self.events.publish(self.report)

    async def full_report(self) -> FleetReport:
        """Return a report with transfer statistics for a new subscriber, polling if needed. Never raises."""
        if not self._has_hand_offs:
            await self._refresh()
        return self.report

    async def _refresh(self) -> None:
        with_hand_offs = self.events.has_subscribers
        before = self.is_ready, self.reasons
        try:
            report = await self._scheduler.fleet(with_hand_offs)
        except (WeftError, KeyError) as error:
            if UNREACHABLE not in self.reasons:
                logger.warning("scheduler unreachable error=%s", error)
            fleets = {model: ModelFleet(fleet.workers, UNREACHABLE) for model, fleet in self._fleets.items()}
            # a new object, so that caches of its serialized form notice the changed readiness
            self.report = replace(self.report)
        else:
            workers = tuple(worker for worker in report.workers if worker.model in self._fleets)
            loading = tuple(worker for worker in report.loading if worker.model in self._fleets)
            self.report = replace(report, workers=workers, loading=loading)
            self._has_hand_offs = with_hand_offs
            fleets = {model: _of_model(model, self.report) for model in self._fleets}
        self._fleets = fleets
        for model, fleet in fleets.items():
            if not fleet.reasons:
                by = {role: fleet.serving(role) for role in (WorkerRole.DECODE, WorkerRole.PREFILL)}
                self._served[model] = _LastServed(self._clock(), by)
        if (self.is_ready, self.reasons) != before:
            logger.info("readiness changed ready=%s reasons=%s", self.is_ready, "; ".join(self.reasons) or "none")
