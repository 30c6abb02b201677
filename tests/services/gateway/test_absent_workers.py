"""No worker takes a new request: it waits for one that was there a moment ago, as a stream under way does."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import httpx
import pytest

from tests.services.gateway.conftest import END, MODEL_NAME, Bench, MakeBench
from tests.services.gateway.fake_scheduler import FakeScheduler
from tests.services.gateway.fakes import answering
from tests.services.gateway.test_embeddings import with_prefill
from tests.services.gateway.test_migrations import ask as moved
from weft.errors import NoWorker
from weft.fleet_types import WorkerHello, WorkerReport, WorkerStatus
from weft.request import ModelFingerprint, WorkerAddress, WorkerRole
from weft.stall_clock import TICK_SECONDS, StallAwareClock
from weft_services.gateway.mesh import embeddings, fleet
from weft_services.gateway.mesh.fleet import FleetWatcher
from weft_services.gateway.mesh.scheduler_client import FleetReport

NOBODY = (grpc.StatusCode.UNAVAILABLE, "no decode worker is live", (("weft-reason", NoWorker.reason),))
LOADING = (grpc.StatusCode.UNAVAILABLE, "it is being loaded", (("weft-reason", "model_loading"),))
UNKNOWN = (grpc.StatusCode.NOT_FOUND, "no worker serves it")
MISMATCH = (grpc.StatusCode.UNAVAILABLE, "no prefill worker runs what the decode workers run")


async def ask(b: Bench, **fields: Any) -> httpx.Response:
    return await b.http.post("/v1/completions", json={"model": MODEL_NAME, "prompt": "x", **fields})


async def asked_while(b: Bench, refusal: Any, num_tries: int = 3) -> httpx.Response:
    """A request that is refused so many times before there is a worker."""
    b.decode.script = answering([*b.ids("hello"), END])
    b.scheduler.refusal = refusal
    task = asyncio.create_task(ask(b))
    await b.scheduler.until(lambda: len(b.scheduler.routed) >= num_tries)
    b.scheduler.refusal = None
    return await task


@pytest.mark.parametrize("refusal", [NOBODY, LOADING, UNKNOWN], ids=["lost", "started anew", "scheduler started anew"])
async def test_request_waits_for_a_worker_that_was_there(bench: MakeBench, refusal: Any) -> None:
    async with bench() as b:
        response = await asked_while(b, refusal)
        assert response.status_code == 200
        assert {route.key.generation for route in b.scheduler.routed} == {0}, "it has had no place before others"


async def test_request_waits_for_the_scheduler(bench: MakeBench) -> None:
    async with bench() as b:
        b.decode.script = answering([*b.ids("hello"), END])
        await b.scheduler.kill()
        task = asyncio.create_task(ask(b))
        await asyncio.sleep(0.3)
        assert not task.done()
        again = FakeScheduler(b.scheduler.decoders, MODEL_NAME, b.scheduler.max_context)
        await again.open(b.scheduler.address)
        try:
            assert (await task).status_code == 200
        finally:
            await again.kill()


async def test_request_is_refused_when_its_wait_is_over(bench: MakeBench) -> None:
    async with bench(migration_timeout_seconds=0.2) as b:
        b.scheduler.refusal = NOBODY
        response = await ask(b)
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert len(b.scheduler.routed) > 1
        assert b.scheduler.settled == [], "a refused request holds nothing"


@pytest.mark.parametrize("refusal", [NOBODY, LOADING, UNKNOWN], ids=["none", "loading", "unknown"])
async def test_request_is_refused_at_once_when_none_ever_served(bench: MakeBench, refusal: Any) -> None:
    async with bench() as b:
        b.scheduler.decoders, b.scheduler.refusal = [], refusal
        await b.gateway.watch.poll()
        b.gateway.watch._served[MODEL_NAME] = fleet._LastServed()
        assert (await ask(b)).status_code == 503
        assert len(b.scheduler.routed) == 1


@pytest.mark.parametrize(
    ("refusal", "fields", "drained"),
    [(MISMATCH, {}, set()), (NOBODY, {"reject_if_busy": True}, set()), (NOBODY, {}, {"decode-0"})],
    ids=["workers differ", "no wait is wanted", "an operator drained the worker"],
)
async def test_request_is_refused_at_once_when_no_wait_can_help(
    bench: MakeBench, refusal: Any, fields: dict[str, Any], drained: set[str]
) -> None:
    async with bench() as b:
        b.scheduler.draining |= drained
        await b.gateway.watch.poll()
        b.scheduler.refusal = refusal
        assert (await ask(b, **fields)).status_code == 503
        assert len(b.scheduler.routed) == 1


async def test_embedding_waits_for_a_worker(bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "PAUSE_SECONDS", 0.05)
    async with bench() as b, with_prefill(b):
        b.scheduler.is_prefill_ready = False
        await b.gateway.watch.poll()
        task = asyncio.create_task(b.http.post("/v1/embeddings", json={"model": MODEL_NAME, "input": "x"}))
        await asyncio.sleep(0.2)
        assert not task.done()
        b.scheduler.is_prefill_ready = True
        assert (await task).status_code == 200


async def test_embedding_that_kills_workers_ends(bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "PAUSE_SECONDS", 0.01)
    async with bench() as b, with_prefill(b) as (worker,):
        worker.refusal = grpc.StatusCode.UNAVAILABLE
        response = await b.http.post("/v1/embeddings", json={"model": MODEL_NAME, "input": "x"})
        assert response.status_code == 503
        assert len(worker.asked) == embeddings.MAX_TRIES


async def test_lost_stream_blames_no_worker_after_a_standstill(bench: MakeBench, heard: None) -> None:
    """Its only worker is asked again at once, and losses do not add up to the end of the stream."""
    async with bench() as b:
        answer = [*b.ids("hello world"), END]
        b.decode.script = answering(answer, dies_after=1)
        clock = b.gateway.pipeline._mesh.clock
        clock._resumed_at = clock()
        task = asyncio.create_task(moved(b))
        await b.scheduler.until(lambda: len(b.scheduler.routed) > 1)
        assert not b.scheduler.routed[1].excluded_boot_ids
        task.cancel()


class Picture:
    """A scheduler that answers by a list of workers, and the gateway's view of it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.workers = [worker("prefill-0", WorkerRole.PREFILL), worker("decode-0", WorkerRole.DECODE)]
        self.watch = FleetWatcher(self, [MODEL_NAME], lambda: self.now)  # type: ignore[arg-type]

    async def fleet(self, with_hand_offs: bool) -> FleetReport:
        return FleetReport(tuple(self.workers))

    async def misses(self, *workers: WorkerStatus) -> bool:
        self.workers = list(workers)
        await self.watch.poll()
        return self.watch.was_served_recently(MODEL_NAME, 30.0)


def worker(worker_id: str, role: WorkerRole) -> WorkerStatus:
    fingerprint = ModelFingerprint("", "bfloat16", 16, 1, "v1")
    hello = WorkerHello(WorkerAddress(worker_id, "boot", "127.0.0.1:1"), role, MODEL_NAME, fingerprint, 10, 99)
    return WorkerStatus(hello, WorkerReport(ready=True))


def not_ready(status: WorkerStatus, is_draining: bool = False, is_asleep: bool = False) -> WorkerStatus:
    return replace(status, report=WorkerReport(is_draining=is_draining, is_asleep=is_asleep))


PREFILL, DECODE = worker("prefill-0", WorkerRole.PREFILL), worker("decode-0", WorkerRole.DECODE)


@pytest.mark.parametrize(
    ("then", "is_missed"),
    [
        ((), True),
        ((PREFILL,), True),
        ((PREFILL, not_ready(DECODE)), True),
        ((PREFILL, not_ready(DECODE, is_draining=True)), False),
        ((PREFILL, not_ready(DECODE, is_asleep=True)), False),
        ((not_ready(PREFILL, is_draining=True), DECODE), False),
        ((not_ready(PREFILL, is_draining=True),), True),
        ((PREFILL, DECODE), True),
    ],
    ids=["all", "one", "not ready", "drained", "asleep", "other role drained", "one each", "none"],
)
async def test_watch_misses_workers_that_left_by_themselves(then: tuple[WorkerStatus, ...], is_missed: bool) -> None:
    picture = Picture()
    await picture.watch.poll()
    picture.now += 5.0
    assert await picture.misses(*then) is is_missed


async def test_watch_misses_the_lost_one_beside_a_drained_one() -> None:
    picture = Picture()
    other = worker("decode-1", WorkerRole.DECODE)
    picture.workers.append(other)
    await picture.watch.poll()
    assert await picture.misses(PREFILL, not_ready(other, is_draining=True))


async def test_watch_misses_no_worker_for_long() -> None:
    picture = Picture()
    await picture.watch.poll()
    picture.now += 31.0
    assert not await picture.misses()


async def test_watch_misses_no_worker_that_never_was() -> None:
    assert not await Picture().misses(PREFILL)


async def test_watch_counts_no_standstill_of_its_own() -> None:
    picture = Picture()
    clock = StallAwareClock(lambda: picture.now)
    picture.watch = FleetWatcher(picture, [MODEL_NAME], clock)  # type: ignore[arg-type]
    ticks = asyncio.create_task(clock.tick())
    await asyncio.sleep(0)
    await picture.watch.poll()
    picture.now += 60.0
    assert await picture.misses()
    for _ in range(round(31.0 / TICK_SECONDS)):
        picture.now += TICK_SECONDS
        clock()
    assert not await picture.misses()
    ticks.cancel()
