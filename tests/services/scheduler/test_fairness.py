"""What floods leave to others, minute by simulated minute: of other tenants, and of lower priorities. With the settings
that the scheduler has when nobody says otherwise."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from tests.services.scheduler.fakes import MODEL
from weft.errors import Overloaded
from weft.fleet_types import Priority, RouteQuery
from weft.request import RequestKey
from weft_services.scheduler.admission import (
    LOWER_CLASS_SHARE,
    LOWER_CLASS_WAIT_SHARE,
    AdmissionQueue,
    QueuedRequest,
)
from weft_services.scheduler.config import SchedulerConfig

BUSY = Overloaded("full", 1.0)
INTERACTIVE, DEFAULT, BATCH = Priority.INTERACTIVE, Priority.DEFAULT, Priority.BATCH
SECONDS = 60.0
PROMPT_TOKENS = 1000
QUEUE_SECONDS = SchedulerConfig().max_queue_wait_seconds


@dataclass(frozen=True)
class Clients:
    """Who asks for how much: requests a second."""

    rate: float
    tenant: bytes = b""
    priority: Priority = DEFAULT


def query(name: str, tenant: bytes = b"", priority: Priority = DEFAULT) -> RouteQuery:
    return RouteQuery(RequestKey(name), MODEL, PROMPT_TOKENS, 0, tenant=tenant, priority=priority)


def default_room(max_waiting: int = SchedulerConfig().max_queue) -> AdmissionQueue:
    return AdmissionQueue(max_waiting, QUEUE_SECONDS)


def name_of(queued: QueuedRequest) -> str:
    return queued.query.key.request_id.split("/")[0]


class Minute:
    """A fleet that has a place every tenth of a second, and always somebody who waits for it."""

    PLACES_A_SECOND = 10

    def __init__(self, queue: AdmissionQueue, everybody: Mapping[str, Clients]) -> None:
        self.asked: Counter[str] = Counter()
        self.placed: Counter[str] = Counter()
        self.given_up: Counter[str] = Counter()
        self._queue = queue
        dice = random.Random(1)
        events: list[tuple[float, str]] = []
        for name, clients in everybody.items():
            at = 0.0
            while (at := at + dice.expovariate(clients.rate)) < SECONDS:
                events.append((at, name))
        places = round(SECONDS * self.PLACES_A_SECOND)
        events += [(number / self.PLACES_A_SECOND, "") for number in range(1, places + 1)]
        for now, name in sorted(events):
            self._give_up(now)
            if name:
                self._ask(name, everybody[name], now)
            else:
                self._place(now)

    def _ask(self, name: str, clients: Clients, now: float) -> None:
        self.asked[name] += 1
        try:
            asked = query(f"{name}/{self.asked[name]}", clients.tenant, clients.priority)
            self._queue.add(asked, now, BUSY)
        except Overloaded:
            pass

    def _place(self, now: float) -> None:
        for queued in [*self._queue.due_shares(now), *self._queue.waiting][:1]:
            self._queue.place(queued, now)
            self.placed[name_of(queued)] += 1

    def _give_up(self, now: float) -> None:
        for queued in [queued for queued in self._queue.waiting if queued.expires_at < now]:
            self._queue.remove(queued, now)
            self.given_up[name_of(queued)] += 1


@pytest.mark.parametrize("max_waiting", [SchedulerConfig().max_queue, 12])
def test_small_tenant_gets_its_share_next_to_a_flood(max_waiting: int) -> None:
    minute = Minute(default_room(max_waiting), {"flood": Clients(100, b"flood"), "small": Clients(2, b"small")})
    assert minute.placed["small"] >= 0.95 * minute.asked["small"]
    assert minute.placed.total() == pytest.approx(600, abs=5), "no place stays empty for it"
    assert minute.given_up.total() <= 0.1 * minute.placed.total(), "who is let in gets a place"


def test_floods_get_equal_shares() -> None:
    flood = {f"t{number}": Clients(10.0 * (number + 1), b"%d" % number) for number in range(4)}
    placed = Minute(default_room(), flood).placed
    assert max(placed.values()) <= 1.15 * min(placed.values())


def test_use_of_an_idle_fleet_is_not_held_against_a_tenant() -> None:
    queue = default_room()
    for number in range(5000):
        queue.charge(query(str(number), b"old"), 0.0)
    minute = Minute(queue, {"old": Clients(2, b"old"), "new": Clients(30, b"new")})
    assert minute.placed["old"] >= 0.95 * minute.asked["old"]


def test_a_past_without_any_use_is_worth_nothing() -> None:
    queue = default_room()
    for number in range(5000):
        queue.charge(query(str(number), b"old"), 0.0)
    placed = Minute(queue, {"old": Clients(30, b"old"), "new": Clients(30, b"new")}).placed
    assert placed["new"] == pytest.approx(placed["old"], rel=0.1)


@pytest.mark.parametrize(("high", "low"), [(DEFAULT, BATCH), (INTERACTIVE, BATCH), (INTERACTIVE, DEFAULT)])
def test_no_priority_starves_under_a_flood_of_a_higher_one(high: Priority, low: Priority) -> None:
    minute = Minute(default_room(), {"high": Clients(30, priority=high), "low": Clients(2, priority=low)})
    share = minute.placed["low"] / minute.placed.total()
    assert 0.75 * LOWER_CLASS_SHARE <= share <= 1.1 * LOWER_CLASS_SHARE
    assert minute.given_up["low"] <= 0.1 * minute.placed["low"]


def test_lower_class_gets_no_more_than_its_share() -> None:
    flood = {
        "interactive": Clients(30, priority=INTERACTIVE),
        "default": Clients(30, priority=DEFAULT),
        "batch": Clients(300, priority=BATCH),
    }
    placed = Minute(default_room(), flood).placed
    for name in ("default", "batch"):
        assert placed[name] / placed.total() == pytest.approx(LOWER_CLASS_SHARE, rel=0.1)


def test_tenants_of_a_lower_class_are_served_fairly() -> None:
    flood = {
        "default": Clients(30),
        "many": Clients(30, b"many", BATCH),
        "few": Clients(0.4, b"few", BATCH),
    }
    placed = Minute(default_room(), flood).placed
    assert placed["few"] >= 0.25 * placed["many"], "a fortieth of the requests"


def due(queue: AdmissionQueue, now: float) -> list[str]:
    return [name_of(queued) for queued in queue.due_shares(now)]


def test_share_is_due_after_a_wait_and_charged_afterwards() -> None:
    queue = default_room()
    queue.add(query("batch", priority=BATCH), 0.0, BUSY)
    queue.add(query("default"), 0.0, BUSY)
    assert due(queue, 0.0) == []
    waited = LOWER_CLASS_WAIT_SHARE * QUEUE_SECONDS
    assert due(queue, waited) == ["batch"]
    queue.charge(query("another batch", priority=BATCH), waited)
    assert due(queue, waited) == []
    for number in range(round(1 / LOWER_CLASS_SHARE) - 1):
        assert due(queue, waited) == []
        queue.charge(query(f"default {number}"), waited)
    assert due(queue, waited) == ["batch"]


def test_one_tenant_leaves_places_for_others_in_a_small_room() -> None:
    queue = default_room(8)
    for number in range(5):
        queue.add(query(str(number), b"one"), 0.0, BUSY)
    with pytest.raises(Overloaded):
        queue.add(query("too many", b"one"), 0.0, BUSY)
    for name in (b"two", b"two", b"three"):
        queue.add(query(name.decode(), name), 0.0, BUSY)
    with pytest.raises(Overloaded):
        queue.add(query("full", b"four"), 0.0, BUSY)
