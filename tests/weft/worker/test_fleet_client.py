"""Load progress, joining, reporting and leaving, against a scheduler of a few lines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc

from tests.services.scheduler.fakes import serving
from weft.asyncio_compat import background_tasks
from weft.engine.messages import EngineLoad
from weft.fleet_types import WorkerHello
from weft.request import ModelFingerprint, WorkerAddress, WorkerRole
from weft.rpc.server import RpcServer
from weft.worker import fleet_client as module
from weft.worker.fleet_client import LoadProgress, Membership, reporting_progress
from weft_mesh.v1 import common_pb2, scheduler_service_pb2_grpc
from weft_mesh.v1 import scheduler_service_pb2 as pb
from weft_mesh.v1 import scheduler_service_pb2 as pb2
from weft_services.scheduler.affinity import AffinityStore

INTRODUCTION = WorkerHello(
    address=WorkerAddress("decode-3", "boot", "10.0.0.3:7000"),
    role=WorkerRole.DECODE,
    model="nano",
    fingerprint=ModelFingerprint("cafe", "float32", 16, 4096, "v1"),
    num_blocks=99,
    max_context_tokens=512,
    transport="mooncake",
    metrics_address="10.0.0.3:9000",
)
LOAD = EngineLoad(1, 2, 3, 4, free_blocks=5, cached_blocks=6, active_blocks=7, quarantined_blocks=8)


class Fleet(scheduler_service_pb2_grpc.FleetServiceServicer):
    """Collects the messages of workers."""

    def __init__(self) -> None:
        self.said: asyncio.Queue[pb2.JoinRequest] = asyncio.Queue()
        self.wish: pb2.JoinResponse | None = None

    async def Join(self, request_iterator: Any, context: Any) -> AsyncIterator[pb2.JoinResponse]:
        async for request in request_iterator:
            self.said.put_nowait(request)
            if request.WhichOneof("message") == "hello":
                yield pb2.JoinResponse(report_interval_ms=10)
            elif self.wish is not None:
                wish, self.wish = self.wish, None
                yield wish

    async def ListWorkers(self, request: Any, context: Any) -> pb2.ListWorkersResponse:
        raise AssertionError("workers do not ask")

    async def Drain(self, request: Any, context: Any) -> pb2.DrainResponse:
        raise AssertionError("workers do not ask")

    async def Announce(self, request_iterator: Any, context: Any) -> pb2.AnnounceResponse:
        raise AssertionError("it has joined")

    async def SetRole(self, request: Any, context: Any) -> Any:
        raise AssertionError("workers do not ask")

    async def Sleep(self, request: Any, context: Any) -> pb2.SleepResponse:
        raise AssertionError("workers do not ask")

    async def until_draining(self, is_draining: bool) -> pb2.WorkerReport:
        """Wait for a report that says so."""
        while (report := await self.next("report")).draining != is_draining:
            pass
        assert isinstance(report, pb2.WorkerReport)
        return report

    async def next(self, kind: str) -> Any:
        """Return the next message, which must be of this kind."""
        async with asyncio.timeout(10):
            message = await self.said.get()
        assert message.WhichOneof("message") == kind
        return getattr(message, kind)

    async def until_not_ready(self) -> pb2.WorkerReport:
        """Wait for a report that says so."""
        while (report := await self.next("report")).ready:
            pass
        assert isinstance(report, pb2.WorkerReport)
        return report


@asynccontextmanager
async def start_fleet(port: int = 0) -> AsyncIterator[tuple[Fleet, str]]:
    rpc, fleet = RpcServer([]), Fleet()
    scheduler_service_pb2_grpc.add_FleetServiceServicer_to_server(fleet, rpc.server)
    try:
        yield fleet, await rpc.start("127.0.0.1", port)
    finally:
        await rpc.stop(0)


async def test_a_worker_introduces_itself_and_then_reports() -> None:
    async with start_fleet() as (fleet, address), background_tasks() as tasks:
        membership = Membership(address, INTRODUCTION, lambda: LOAD, lambda: True)
        tasks.create_task(membership.run())
        await membership.until_joined()
        hello = await fleet.next("hello")
        assert (hello.worker.worker_id, hello.worker.boot_id, hello.worker.address) == (
            "decode-3",
            "boot",
            "10.0.0.3:7000",
        )
        assert (hello.model, hello.num_blocks, hello.transport) == ("nano", 99, "mooncake")
        for _ in range(3):
            report = await fleet.next("report")
            assert report.ready
            assert (report.num_running, report.num_waiting, report.queued_prefill_tokens) == (1, 2, 3)
            assert (report.free_blocks, report.quarantined_blocks) == (5, 8)


async def test_a_dead_engine_or_a_full_pool_is_not_ready() -> None:
    async with start_fleet() as (fleet, address), background_tasks() as tasks:
        loads, able = [LOAD], [True]
        membership = Membership(address, INTRODUCTION, lambda: loads[-1], lambda: able[-1])
        tasks.create_task(membership.run())
        await fleet.next("hello")
        assert (await fleet.next("report")).ready
        loads.append(EngineLoad(active_blocks=26))
        assert (await fleet.until_not_ready()).full
        loads.append(LOAD)
        while not (await fleet.next("report")).ready:
            pass
        able.append(False)
        assert not (await fleet.until_not_ready()).full
        loads.append(EngineLoad(active_blocks=26))
        report = await fleet.next("report")
        assert (report.ready, report.full) == (False, False), "what holds its blocks does not move"


async def test_a_scheduler_that_comes_back_is_joined_again() -> None:
    async with background_tasks() as tasks:
        async with start_fleet() as (first, address):
            membership = Membership(address, INTRODUCTION, lambda: LOAD, lambda: True)
            tasks.create_task(membership.run())
            await first.next("hello")
        async with start_fleet(int(address.rpartition(":")[2])) as (second, _):
            assert (await second.next("hello")).worker.boot_id == "boot"
            await second.next("report")


async def test_a_report_that_cannot_be_made_costs_the_stream_and_not_the_membership() -> None:
    async with start_fleet() as (fleet, address), background_tasks() as tasks:
        bad = list[EngineLoad]()
        membership = Membership(address, INTRODUCTION, lambda: bad.pop() if bad else LOAD, lambda: True)
        keeping = tasks.create_task(membership.run())
        await fleet.next("hello")
        await fleet.next("report")
        bad.append(replace(LOAD, num_running=-1))  # no number that the wire has
        async with asyncio.timeout(20):
            while (await fleet.said.get()).WhichOneof("message") != "hello":
                pass
        assert (await fleet.next("report")).ready
        assert not keeping.done()


async def test_two_schedulers_hear_the_same_and_draining_on_one_is_told_to_both() -> None:
    async with start_fleet() as (one, first), start_fleet() as (two, second), background_tasks() as tasks:
        membership = Membership(f"{first},{second}", INTRODUCTION, lambda: LOAD, lambda: True)
        tasks.create_task(membership.run())
        for fleet in (one, two):
            await fleet.next("hello")
            assert (await fleet.next("report")).ready
        one.wish = pb2.JoinResponse(report_interval_ms=10, drain=True)
        for fleet in (one, two):
            assert not (await fleet.until_draining(True)).ready
        two.wish = pb2.JoinResponse(report_interval_ms=10, drain=False)
        for fleet in (one, two):
            assert (await fleet.until_draining(False)).ready
        await membership.leave(5)
        for fleet in (one, two):
            await fleet.until_not_ready()


async def test_sleep_and_waking_are_told_to_all_and_awaited() -> None:
    async with start_fleet() as (one, first), start_fleet() as (two, second), background_tasks() as tasks:
        awake = Membership(f"{first},{second}", INTRODUCTION, lambda: LOAD, lambda: True)
        tasks.create_task(awake.run())
        for fleet in (one, two):
            await fleet.next("hello")
            assert (await fleet.next("report")).ready
        one.wish = pb2.JoinResponse(report_interval_ms=10, sleep=True)
        async with asyncio.timeout(10):
            await awake.until_sleep_changes()
        for fleet in (one, two):
            while not (report := await fleet.next("report")).asleep:
                pass
            assert not report.ready
    async with start_fleet() as (fleet, address), background_tasks() as tasks:
        asleep = Membership(address, INTRODUCTION, lambda: LOAD, lambda: True, is_asleep=True)
        tasks.create_task(asleep.run())
        await fleet.next("hello")
        report = await fleet.next("report")
        assert (report.asleep, report.ready) == (True, False)
        fleet.wish = pb2.JoinResponse(report_interval_ms=10, sleep=True)  # it is already
        await fleet.next("report")
        await fleet.next("report")
        fleet.wish = pb2.JoinResponse(report_interval_ms=10, sleep=False)
        async with asyncio.timeout(10):
            await asleep.until_sleep_changes()
        assert not asleep.is_asleep


async def test_one_scheduler_of_two_is_enough() -> None:
    async with start_fleet() as (_, gone):
        pass
    async with start_fleet() as (fleet, address), background_tasks() as tasks:
        membership = Membership(f"{gone},{address}", INTRODUCTION, lambda: LOAD, lambda: True)
        tasks.create_task(membership.run())
        await membership.until_joined()
        await fleet.next("hello")
        assert (await fleet.next("report")).ready


async def test_leaving_is_told_before_it_returns() -> None:
    async with start_fleet() as (fleet, address), background_tasks() as tasks:
        membership = Membership(address, INTRODUCTION, lambda: LOAD, lambda: True)
        tasks.create_task(membership.run())
        await membership.until_joined()
        await fleet.next("hello")
        await membership.leave(5)
        await fleet.until_not_ready()
        assert not (await fleet.next("report")).ready


async def test_leaving_without_a_scheduler_does_not_wait_for_ever() -> None:
    async with start_fleet() as (_, address):
        pass
    async with background_tasks() as tasks:
        membership = Membership(address, INTRODUCTION, lambda: LOAD, lambda: True)
        tasks.create_task(membership.run())
        await membership.leave(0.05)


async def test_a_role_that_was_changed_is_kept_and_told_to_a_scheduler_that_comes_back() -> None:
    introduction = replace(INTRODUCTION, can_change_role=True)
    async with background_tasks() as tasks:
        async with start_fleet() as (first, address):
            membership = Membership(address, introduction, lambda: LOAD, lambda: True)
            tasks.create_task(membership.run())
            hello = await first.next("hello")
            assert (hello.role, hello.can_change_role) == (common_pb2.WORKER_ROLE_DECODE, True)
            first.wish = pb2.JoinResponse(report_interval_ms=10, role=common_pb2.WORKER_ROLE_PREFILL)
            while (await first.next("report")).role != common_pb2.WORKER_ROLE_PREFILL:
                pass
        async with start_fleet(int(address.rpartition(":")[2])) as (second, _):
            assert (await second.next("hello")).role == common_pb2.WORKER_ROLE_PREFILL


async def test_a_worker_of_one_role_keeps_it() -> None:
    async with start_fleet() as (fleet, address), background_tasks() as tasks:
        tasks.create_task(Membership(address, INTRODUCTION, lambda: LOAD, lambda: True).run())
        assert not (await fleet.next("hello")).can_change_role
        fleet.wish = pb2.JoinResponse(report_interval_ms=10, role=common_pb2.WORKER_ROLE_PREFILL)
        roles = [(await fleet.next("report")).role for _ in range(5)]
        assert set(roles) == {common_pb2.WORKER_ROLE_DECODE}


async def listed(fleet: Any) -> list[pb.WorkerArrival]:
    """Return the loading workers that this scheduler lists."""
    return list((await fleet.ListWorkers(pb.ListWorkersRequest())).arrivals)


async def until(fleet: Any, phase: str) -> pb.WorkerArrival:
    async with asyncio.timeout(20):
        while True:
            for arrival in await listed(fleet):
                if arrival.phase == phase:
                    return arrival


async def test_every_scheduler_hears_how_far_it_is(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "INTERVAL_SECONDS", 0.01)
    arrival = LoadProgress("prefill-3", WorkerRole.PREFILL, "nano")
    async with serving(AffinityStore("", 60)) as one, serving(AffinityStore("", 60)) as two:
        async with reporting_progress(f"{one.address}, {two.address}", arrival):
            await until(one.fleet, "starting")
            arrival.set_phase("reading weights")
            arrival.set_bytes(3, 7)
            for scheduler in (one, two):
                told = await until(scheduler.fleet, "reading weights")
                assert (told.worker_id, told.model) == ("prefill-3", "nano")
            arrival.set_phase("building the engine")
            told = await until(two.fleet, "building the engine")
            assert (told.done_bytes, told.total_bytes) == (0, 0), "bytes are of the phase before"
        async with asyncio.timeout(20):
            while await listed(one.fleet) or await listed(two.fleet):
                pass


async def test_a_scheduler_that_is_away_or_old_holds_nothing_up(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.01)
    asked = asyncio.Event()

    class Old(grpc.aio.ServerInterceptor):  # type: ignore[misc, unused-ignore]
        """A scheduler without this method."""

        async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
            asked.set()
            return await continuation(handler_call_details)

    server = grpc.aio.server(interceptors=[Old()])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    gone = RpcServer([])
    away = await gone.start("127.0.0.1", 0)
    await gone.stop(0)
    async with asyncio.timeout(20):
        async with reporting_progress(f"127.0.0.1:{port},{away}", LoadProgress("w", WorkerRole.DECODE, "nano")):
            await asked.wait()
            asked.clear()
            await asked.wait()  # and again: it may be another by then
    await server.stop(0)


async def test_it_ends_by_itself_once_the_worker_has_joined(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "INTERVAL_SECONDS", 0.01)
    arrival = LoadProgress("decode-3", WorkerRole.DECODE, "nano")
    async with serving(AffinityStore("", 60)) as scheduler, reporting_progress(scheduler.address, arrival):
        await until(scheduler.fleet, "starting")
        arrival.is_done = True
        async with asyncio.timeout(20):
            while await listed(scheduler.fleet):
                pass


async def test_what_cannot_be_said_is_tried_again_and_a_bug_is_told(monkeypatch: Any, caplog: Any) -> None:
    caplog.set_level("DEBUG")
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.01)
    arrival = LoadProgress("decode-3", WorkerRole.DECODE, "nano", done_bytes=-1)  # no number that the wire has
    async with serving(AffinityStore("", 60)) as scheduler, asyncio.timeout(20):
        async with reporting_progress(scheduler.address, arrival):
            while "failed by a bug on our side" not in caplog.text:
                await listed(scheduler.fleet)
            arrival.set_bytes(1, 7)
            assert (await until(scheduler.fleet, "starting")).done_bytes == 1

        def broken(address: str) -> Any:
            raise RuntimeError("a bug")

        monkeypatch.setattr(module, "open_channel", broken)
        async with reporting_progress(scheduler.address, arrival):
            await asyncio.sleep(0)
        assert "load progress reporting failed" in caplog.text
