"""Fleets of mixed sizes and requests of every kind, at random: nobody waits beside workers that have room for all who
fit there or takes what somebody before it waits for, and all that is booked is given back."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from contextlib import suppress

import pytest

from tests.services.scheduler.fakes import MODEL, Clock, worker_info
from weft.errors import Overloaded
from weft.fleet_types import Priority, RouteQuery, WorkerReport
from weft.request import RequestKey, RequestStage, WorkerRole
from weft_services.scheduler.admission import AdmissionQueue
from weft_services.scheduler.affinity import AffinityStore
from weft_services.scheduler.dispatch import Dispatcher, DutyCycle
from weft_services.scheduler.fleet_state import Worker
from weft_services.scheduler.policy import UNRESTRICTED, BackfillWindow, CostPolicy, PlacementDecision
from weft_services.scheduler.router import AttemptProgress, Router

STEPS = 150
LONGEST_ANSWER = 40
BLOCK_TOKENS = 16
LOOK_SHARE = 0.1


class Mesh:
    """A worker of each size stays, so that all requests wait for room alone; others come and go."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.router, self.queue, clock = Router(1e9), AdmissionQueue(2 * STEPS, 1000.0), Clock()
        self.dispatcher = Dispatcher(self.router, AffinityStore("", 60), lambda: self.queue, clock)
        self.sizes = self.random.sample(range(2, 40), self.random.randint(1, 4))
        self.workers: list[Worker] = []
        for num_blocks in self.sizes:
            self.start(num_blocks)
        longest = max(self.sizes) * BLOCK_TOKENS - 1
        self.kinds = [(self.random.randint(1, longest), self.random.randint(1, LONGEST_ANSWER)) for _ in range(4)]
        self.asked: list[tuple[RouteQuery, asyncio.Task[PlacementDecision]]] = []

    def start(self, num_blocks: int) -> None:
        info = worker_info(f"w{len(self.workers)}", WorkerRole.BOTH, num_blocks=num_blocks)
        self.workers.append(self.dispatcher.join(info))
        self.dispatcher.report(self.workers[-1], WorkerReport(ready=True))

    def ask(self) -> None:
        tokens, answer = self.random.choice(self.kinds)
        tenant, priority = self.random.choice([b"a", b"b"]), self.random.choice(list(Priority))
        query = RouteQuery(RequestKey(str(len(self.asked))), MODEL, tokens, answer, tenant=tenant, priority=priority)
        self.asked.append((query, asyncio.create_task(self.dispatcher.route(query))))

    def go_on(self) -> None:
        """One that has its place, or gives up waiting for it."""
        if not self.asked:
            return
        query, asked = self.random.choice(self.asked)
        if asked.done():
            stage = self.random.choice([RequestStage.DECODING, RequestStage.FINISHED, RequestStage.CANCELLED])
            self.dispatcher.settle([AttemptProgress(query.key, stage)])
        elif self.random.random() < 0.1:
            asked.cancel()

    def change(self) -> None:
        """A worker comes, or one of those that do not stay goes, is full or has room again."""
        worker = self.random.choice(self.workers)
        if worker not in self.workers[len(self.sizes) :] or self.random.random() < 0.3:
            self.start(self.random.choice(self.sizes))
        elif worker in self.dispatcher.router.fleet.workers():
            if self.random.random() < 0.3:
                self.dispatcher.leave(worker, "gone")
            else:
                is_full = self.random.random() < 0.5
                self.dispatcher.report(worker, WorkerReport(ready=not is_full, full=is_full))

    async def step(self) -> None:
        self.random.choices([self.ask, self.go_on, self.change], [6, 4, 1])[0]()
        await settle()
        self.check_order()

    async def look(self) -> None:
        """Until nothing comes of it any more."""
        before = -1
        while before != (before := self.dispatcher.num_waiting):
            self.dispatcher._scan_queues()
            await settle()
        self.check_order()

    def check_order(self) -> None:
        """Who has gone past others of its tenant and priority takes what is too small for them."""
        waiting = defaultdict[tuple[bytes, Priority], list[int]](list)
        for query, asked in self.asked:
            line = waiting[query.tenant, query.priority]
            if not asked.done():
                line.append(query.prompt_tokens)
            elif line and not asked.cancelled():
                assert asked.result().decode.longest_prompt < min(line)

    def check_room(self) -> None:
        """Nowhere is room for all who fit on workers of a size and below."""
        waiting = [query for query, asked in self.asked if not asked.done()]
        sizes = sorted({worker.longest_prompt for worker in self.dispatcher.router.fleet.workers()})
        for longest in sizes:
            window = UNRESTRICTED if longest == sizes[-1] else BackfillWindow(dict.fromkeys(WorkerRole, longest + 1))
            short = [query for query in waiting if query.prompt_tokens <= longest]
            assert not short or not all(self.has_room(query, window) for query in short)

    def has_room(self, query: RouteQuery, window: BackfillWindow) -> bool:
        with suppress(Overloaded):
            CostPolicy().choose(self.router.fleet.models[MODEL], self.router.routing_input(query), 0.0, window)
            return True
        return False


async def settle() -> None:
    for _ in range(10):  # nothing that anybody asks takes longer
        await asyncio.sleep(0)


@pytest.mark.parametrize("is_at_once", [True, False], ids=["looks at once", "looks now and then"])
@pytest.mark.parametrize("seed", range(20))
async def test_random_fleet_keeps_order_and_leaves_no_room_unused(
    seed: int, is_at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_at_once:
        monkeypatch.setattr(DutyCycle, "request", lambda pace: None)
    mesh = Mesh(seed)
    for _ in range(STEPS):
        await mesh.step()
        if is_at_once or mesh.random.random() < LOOK_SHARE:
            await mesh.look()
            mesh.check_room()
    while mesh.dispatcher.num_waiting:
        mesh.dispatcher.settle(
            [AttemptProgress(query.key, RequestStage.FINISHED) for query, asked in mesh.asked if asked.done()]
        )
        await mesh.look()
    mesh.dispatcher.settle([AttemptProgress(query.key, RequestStage.FINISHED) for query, _ in mesh.asked])
    for worker in mesh.workers:
        booked = worker.reserved
        assert (booked.prefill_tokens, booked.decode_tokens, booked.requests) == (0, 0, 0)
    assert not mesh.queue.waiting
