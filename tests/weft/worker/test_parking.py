"""A worker that sleeps: until it is woken, a signal comes, or not at all where it was woken before."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace

from tests.weft.worker.test_membership import INTRODUCTION, start_fleet
from weft.request import WorkerRole
from weft.worker.parking import ParkedState, run_parked
from weft_mesh.v1 import common_pb2
from weft_mesh.v1 import scheduler_service_pb2 as pb2


async def test_it_sleeps_in_the_fleet_until_it_is_woken() -> None:
    async with start_fleet() as (fleet, address):
        sleeping = asyncio.create_task(run_parked(address, ParkedState(INTRODUCTION, is_asleep=True)))
        assert (await fleet.next("hello")).worker.worker_id == INTRODUCTION.address.worker_id
        report = await fleet.next("report")
        assert (report.parked, report.ready, report.free_blocks) == (True, False, 0)
        assert not sleeping.done()
        fleet.wish = pb2.JoinResponse(report_interval_ms=10, park=False)
        async with asyncio.timeout(10):
            assert await sleeping


async def test_what_it_is_asked_to_be_while_it_sleeps_it_is_when_it_wakes() -> None:
    async with start_fleet() as (fleet, address):
        flexible = replace(INTRODUCTION, can_change_role=True, is_draining=True)
        sleeping = asyncio.create_task(run_parked(address, ParkedState(flexible, is_asleep=True)))
        await fleet.next("hello")
        assert (await fleet.next("report")).draining, "as it was before"
        prefill = common_pb2.WORKER_ROLE_PREFILL
        fleet.wish = pb2.JoinResponse(report_interval_ms=10, role=prefill)
        while (await fleet.next("report")).role != prefill:
            pass
        fleet.wish = pb2.JoinResponse(report_interval_ms=10, park=False)
        async with asyncio.timeout(10):
            assert await sleeping == replace(flexible, role=WorkerRole.PREFILL)


async def test_a_signal_ends_it() -> None:
    async with start_fleet() as (fleet, address):
        sleeping = asyncio.create_task(run_parked(address, ParkedState(INTRODUCTION, is_asleep=True)))
        await fleet.next("hello")
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(10):
            assert not await sleeping


async def test_who_was_woken_while_it_finished_what_it_had_does_not_fall_asleep() -> None:
    async with asyncio.timeout(1):
        assert await run_parked("127.0.0.1:1", ParkedState(INTRODUCTION, is_asleep=False))
