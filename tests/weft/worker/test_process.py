"""Health of a worker, and its sleep."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace

from tests.weft.worker.test_fleet_client import INTRODUCTION, start_fleet
from weft.engine.engine import FIRST_HANG_SECONDS, StepWatchdog
from weft.engine.messages import EngineLoad
from weft.request import WorkerRole
from weft.worker.process import EXHAUSTED_SECONDS, LOST_SECONDS, EngineHealth, SleepState, sleep_until_woken
from weft_mesh.v1 import common_pb2
from weft_mesh.v1 import scheduler_service_pb2 as pb2


class Scene:
    """A worker of 10 blocks with a clock and load set by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.load = EngineLoad(free_blocks=10)
        self.watchdog = StepWatchdog(lambda: self.now)
        self.vitals = EngineHealth(self.watchdog, lambda: self.load, 10, lambda: self.now)


def test_an_idle_worker_is_fit() -> None:
    scene = Scene()
    assert scene.vitals.trouble() == ""
    scene.now += 10 * LOST_SECONDS
    assert scene.vitals.trouble() == ""
    assert not scene.vitals.is_lost


def test_an_engine_that_stands_still_is_trouble_and_at_last_lost() -> None:
    scene = Scene()
    scene.watchdog.start_step()
    scene.now += FIRST_HANG_SECONDS + 1
    assert "has hung" in scene.vitals.trouble()
    assert not scene.vitals.is_lost
    scene.now += LOST_SECONDS
    assert scene.vitals.is_lost
    scene.watchdog.end_step(has_computed=True)
    assert scene.vitals.trouble() == ""


def test_a_pool_in_quarantine_beyond_use_is_trouble() -> None:
    scene = Scene()
    scene.load = EngineLoad(free_blocks=5, quarantined_blocks=5)
    assert scene.vitals.trouble() == ""
    scene.load = EngineLoad(free_blocks=4, quarantined_blocks=6)
    assert "6 of 10 blocks" in scene.vitals.trouble()


def test_a_full_pool_is_trouble_only_when_nothing_moves() -> None:
    scene = Scene()
    for step in range(5):
        scene.load = EngineLoad(active_blocks=10, generated_tokens=step)
        assert scene.vitals.trouble() == ""
        scene.now += EXHAUSTED_SECONDS
    assert scene.vitals.trouble() == ""
    scene.now += EXHAUSTED_SECONDS + 1
    assert "no free block" in scene.vitals.trouble()
    scene.load = EngineLoad(active_blocks=9, cached_blocks=1, generated_tokens=4)
    assert scene.vitals.trouble() == ""


async def test_it_sleeps_in_the_fleet_until_it_is_woken() -> None:
    async with start_fleet() as (fleet, address):
        sleeping = asyncio.create_task(sleep_until_woken(address, SleepState(INTRODUCTION, is_asleep=True)))
        assert (await fleet.next("hello")).worker.worker_id == INTRODUCTION.address.worker_id
        report = await fleet.next("report")
        assert (report.asleep, report.ready, report.free_blocks) == (True, False, 0)
        assert not sleeping.done()
        fleet.wish = pb2.JoinResponse(report_interval_ms=10, sleep=False)
        async with asyncio.timeout(10):
            assert await sleeping


async def test_what_it_is_asked_to_be_while_it_sleeps_it_is_when_it_wakes() -> None:
    async with start_fleet() as (fleet, address):
        flexible = replace(INTRODUCTION, can_change_role=True, is_draining=True)
        sleeping = asyncio.create_task(sleep_until_woken(address, SleepState(flexible, is_asleep=True)))
        await fleet.next("hello")
        assert (await fleet.next("report")).draining, "as it was before"
        prefill = common_pb2.WORKER_ROLE_PREFILL
        fleet.wish = pb2.JoinResponse(report_interval_ms=10, role=prefill)
        while (await fleet.next("report")).role != prefill:
            pass
        fleet.wish = pb2.JoinResponse(report_interval_ms=10, sleep=False)
        async with asyncio.timeout(10):
            assert await sleeping == replace(flexible, role=WorkerRole.PREFILL)


async def test_a_signal_ends_it() -> None:
    async with start_fleet() as (fleet, address):
        sleeping = asyncio.create_task(sleep_until_woken(address, SleepState(INTRODUCTION, is_asleep=True)))
        await fleet.next("hello")
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(10):
            assert not await sleeping


async def test_who_was_woken_while_it_finished_what_it_had_does_not_fall_asleep() -> None:
    async with asyncio.timeout(1):
        assert await sleep_until_woken("127.0.0.1:1", SleepState(INTRODUCTION, is_asleep=False))
