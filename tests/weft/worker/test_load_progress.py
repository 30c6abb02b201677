"""A worker that loads says so to every scheduler, and none of them can hold it up."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from tests.services.scheduler.fakes import serving
from weft.request import WorkerRole
from weft.rpc.server import RpcServer
from weft.worker import fleet_client as module
from weft.worker.fleet_client import LoadProgress, reporting_progress
from weft_mesh.v1 import scheduler_service_pb2 as pb
from weft_services.scheduler.affinity import AffinityStore


async def listed(fleet: Any) -> list[pb.WorkerArrival]:
    """Who loads, as that scheduler sees it."""
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
        """Knows no such method."""

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
