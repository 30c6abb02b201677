"""What a full model does to those who ask for it, and what it does not do to others."""

from __future__ import annotations

import asyncio

import pytest

from tests.services.scheduler.fakes import worker_info
from weft.errors import Overloaded
from weft.request import RequestKey, WorkerRole
from weft_services.scheduler.affinity import Affinity
from weft_services.scheduler.dispatch import Dispatcher
from weft_services.scheduler.router import Router
from weft_services.scheduler.state import NO_PREFERENCE, Placement, Preference, RouteQuery, WorkerReport
from weft_services.scheduler.waiting import WaitingRoom

SEATS = 2


class Asked(Affinity):
    """Counts who is looked up."""

    def __init__(self) -> None:
        super().__init__("", 60)
        self.num_lookups = 0

    async def lookup(self, model: str, session: bytes) -> Preference:
        self.num_lookups += 1
        return NO_PREFERENCE


class Full:
    """Two models with a worker each; the first has no seat left, and one request waits for it."""

    def __init__(self, max_waiting: int) -> None:
        self.affinity = Asked()
        self.dispatcher = Dispatcher(Router(10.0), self.affinity, lambda: WaitingRoom(max_waiting, 20.0))
        for model in ("full", "idle"):
            info = worker_info(f"{model}-0", WorkerRole.BOTH, model=model, num_blocks=SEATS)
            worker = self.dispatcher.join(info)
            self.dispatcher.report(worker, WorkerReport(ready=True, free_blocks=SEATS))

    def ask(self, name: str, model: str = "full") -> asyncio.Task[Placement]:
        query = RouteQuery(RequestKey(name), model, prompt_tokens=4, max_tokens=1)
        return asyncio.create_task(self.dispatcher.route(query))

    async def fill(self) -> asyncio.Task[Placement]:
        for number in range(SEATS):
            await self.ask(str(number))
        waiting = self.ask("waiting")
        for _ in range(10):  # nothing that it asks takes longer
            await asyncio.sleep(0)
        assert self.dispatcher.num_waiting == 1
        return waiting


async def test_who_is_refused_for_those_before_it_is_refused_before_anybody_is_asked() -> None:
    full = Full(max_waiting=1)
    waiting = await full.fill()
    before = full.affinity.num_lookups
    with pytest.raises(Overloaded):
        await full.ask("one too many")
    assert full.affinity.num_lookups == before
    waiting.cancel()


async def test_a_full_model_keeps_nobody_from_another() -> None:
    full = Full(max_waiting=8)
    waiting = await full.fill()
    placement = await asyncio.wait_for(full.ask("other", "idle"), 10)
    assert placement.decode.worker_id == "idle-0"
    assert full.dispatcher.num_waiting == 1
    waiting.cancel()
