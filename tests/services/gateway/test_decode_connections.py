"""Streams to decode workers: one attempt at reaching a worker is that of all who wait for it. And the scheduler's."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import grpc
import pytest

from tests.services.gateway.conftest import MODEL_NAME, MakeBench
from tests.services.gateway.fake_scheduler import FakeScheduler
from tests.services.gateway.fakes import forever
from weft.errors import PeerLost
from weft.request import RequestKey, SamplingParams, WorkerAddress
from weft_mesh.v1.decode_service_pb2_grpc import DecodeServiceServicer, add_DecodeServiceServicer_to_server
from weft_services.gateway.mesh import decode_connection, scheduler_client
from weft_services.gateway.mesh.decode_connection import (
    DecodeConnection,
    DecodeConnectionPool,
    StartCommand,
    UpdateQueue,
    to_start_message,
)
from weft_services.gateway.mesh.scheduler_client import Forecast, SequencePlacement

NUM_REQUESTS = 40


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[DecodeConnection]:
    """Every stream that is begun, in order."""
    begun: list[DecodeConnection] = []

    class Counted(DecodeConnection):
        async def connect(self) -> None:
            begun.append(self)
            await super().connect()

    monkeypatch.setattr(decode_connection, "DecodeConnection", Counted)
    return begun


@pytest.mark.quick_to_notice
async def test_who_waits_for_a_frozen_worker_shares_one_attempt(attempts: list[DecodeConnection]) -> None:
    # its kernel takes connections, and nobody ever reads from them: a process that was stopped
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        worker = WorkerAddress("decode-0", "boot", f"127.0.0.1:{frozen.getsockname()[1]}")
        async with asyncio.TaskGroup() as group:
            streams = DecodeConnectionPool(group)
            asked = [streams.get(worker) for _ in range(NUM_REQUESTS)]
            outcomes = await asyncio.gather(*asked, return_exceptions=True)
            assert [str(each) for each in outcomes] == ["decode-0 cannot be reached"] * NUM_REQUESTS
            assert all(isinstance(each, PeerLost) and each.worker_id == "decode-0" for each in outcomes)
            assert len(attempts) == 1
            # the next request tries anew
            with pytest.raises(PeerLost):
                await streams.get(worker)
            assert len(attempts) == 2


@pytest.mark.quick_to_notice
async def test_a_request_that_leaves_takes_nobody_with_it(attempts: list[DecodeConnection]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        worker = WorkerAddress("decode-0", "boot", f"127.0.0.1:{frozen.getsockname()[1]}")
        async with asyncio.TaskGroup() as group:
            streams = DecodeConnectionPool(group)
            leaving, staying = (group.create_task(_outcome(streams, worker)) for _ in range(2))
            for _ in range(3):  # until both wait
                await asyncio.sleep(0)
            assert len(attempts) == 1
            leaving.cancel()
            assert isinstance(await staying, PeerLost)
            assert leaving.cancelled()
            assert len(attempts) == 1


async def test_a_gateway_that_closes_waits_for_no_worker(attempts: list[DecodeConnection]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as frozen:
        worker = WorkerAddress("decode-0", "boot", f"127.0.0.1:{frozen.getsockname()[1]}")
        async with asyncio.TaskGroup() as group:
            streams = DecodeConnectionPool(group)
            asked = group.create_task(_outcome(streams, worker))
            for _ in range(3):
                await asyncio.sleep(0)
            assert len(attempts) == 1
            streams.close()
            assert str(await asked) == "the gateway is shutting down"


class Patient(DecodeServiceServicer):
    """Keeps every stream for as long as the gateway does."""

    async def Attach(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        async for _ in request_iterator:
            pass


class Hasty(DecodeConnectionPool):
    """Hears in the very turn in which it opens a stream that the worker is not listed."""

    async def _open(self, worker: WorkerAddress) -> DecodeConnection | PeerLost:
        link = await super()._open(worker)
        self.close_absent([])
        return link


@pytest.mark.timeout(60)
async def test_a_stream_to_a_worker_that_is_not_listed_yet_is_never_one_that_nobody_runs() -> None:
    server = grpc.aio.server()
    add_DecodeServiceServicer_to_server(Patient(), server)
    worker = WorkerAddress("decode-0", "boot", f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    await server.start()
    async with asyncio.TaskGroup() as group:
        streams = Hasty(group)
        link = await streams.get(worker)
        await asyncio.sleep(0)
        streams.close_absent([])
        await asyncio.wait_for(streams.wait_lost(10), 20)
        assert link.is_closed
        assert await streams.get(worker) is not link
        streams.close()
    await server.stop(None)


class Impatient(DecodeServiceServicer):
    """Ends every stream as a worker does whose frames nobody reads."""

    async def Attach(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        await anext(request_iterator)
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the gateway reads its stream too slowly")


async def test_a_worker_that_cuts_off_a_slow_gateway_is_not_blamed_for_it() -> None:
    server = grpc.aio.server()
    add_DecodeServiceServicer_to_server(Impatient(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    worker = WorkerAddress("decode-0", "boot", address)
    inbox, key = UpdateQueue(), RequestKey("r")
    start, place = (
        to_start_message(StartCommand(key, (1,), SamplingParams(1), b"")),
        SequencePlacement(worker, None, Forecast()),
    )
    async with asyncio.TaskGroup() as group:
        (await DecodeConnectionPool(group).get(worker)).start(key, start, place, 60.0, inbox)
        (delta,) = await asyncio.wait_for(inbox.wait(), 10)
    assert isinstance(delta.error, PeerLost)
    assert delta.worker_id == delta.error.worker_id == ""
    await server.stop(None)


async def _outcome(streams: DecodeConnectionPool, worker: WorkerAddress) -> DecodeConnection | PeerLost:
    try:
        return await streams.get(worker)
    except PeerLost as error:
        return error


async def test_a_stream_to_the_scheduler_that_has_gone_dead_is_opened_anew(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_streams, answered = 0, FakeScheduler.RouteMany

    async def first_is_dead(scheduler: FakeScheduler, requests: Any, context: Any) -> None:
        nonlocal num_streams
        num_streams += 1
        await (forever() if num_streams == 1 else answered(scheduler, requests, context))

    monkeypatch.setattr(FakeScheduler, "RouteMany", first_is_dead)
    async with bench() as b:
        body = {"model": MODEL_NAME, "prompt": "x"}
        with monkeypatch.context() as hasty:
            hasty.setattr(scheduler_client, "ROUTE_SECONDS", 0.5)
            assert (await b.http.post("/v1/completions", json=body)).status_code == 200
        assert num_streams == 2
