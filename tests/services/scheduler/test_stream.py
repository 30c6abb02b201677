"""Routes over one stream: what a call each would have said, out of order, withdrawn, and given up with the stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import pytest

from tests.services.scheduler.fakes import MODEL, Scheduler, join, route_request, serving
from weft.errors import InvalidRequest, ModelLoading, NotFound, Overloaded, PeerLost, QueueFull, WeftError
from weft.fleet_types import RouteQuery, WorkerHello
from weft.request import ModelFingerprint, WorkerAddress, WorkerRole
from weft.rpc.client import as_weft_error, cancelled_on_exit, open_channel
from weft.rpc.server import RpcServer
from weft_mesh.v1 import common_pb2
from weft_mesh.v1 import scheduler_service_pb2 as pb
from weft_services.gateway.mesh import scheduler_client
from weft_services.gateway.mesh.scheduler_client import RouteStream, StreamLost
from weft_services.scheduler import dispatch, fleet, service
from weft_services.scheduler.admission import AdmissionQueue
from weft_services.scheduler.affinity import AffinityStore
from weft_services.scheduler.fleet_state import Worker
from weft_services.scheduler.policy import PlacementDecision

CANCELLED = pb.Settlement.STAGE_CANCELLED


@asynccontextmanager
async def stream_to(scheduler: Scheduler) -> AsyncIterator[RouteStream]:
    """As a gateway holds it."""
    stream = RouteStream(scheduler.channel)
    running = asyncio.create_task(stream.run())
    try:
        yield stream
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.fixture
async def stream(pair: Scheduler) -> AsyncIterator[RouteStream]:
    async with stream_to(pair) as stream:
        yield stream


async def booked(scheduler: Scheduler) -> int:
    return sum(worker.booked_requests for worker in await scheduler.listed() if worker.hello.role != 1)


async def test_stream_answers_like_calls(pair: Scheduler, stream: RouteStream) -> None:
    """The calls are the oracle: placements with their predictions, and refusals with their kinds."""
    changes: list[dict[str, object]] = [
        {},
        {"prompt_tokens": 300},
        {"model": "other"},
        {"prompt_tokens": 5000},
        {"prompt_tokens": 0},
        {"excluded_worker_ids": ["decode-0"]},
    ]
    fingerprints = set()
    for number, change in enumerate(changes):
        request = route_request(f"r{number}", **change)
        answers: list[pb.RouteResponse | WeftError] = []
        for way in (pair.scheduler.Route, stream.request):
            try:
                answer = await way(request)
                answer.waited_ms = 0  # each one's own
                answers.append(answer)
            except (grpc.aio.AioRpcError, WeftError) as error:
                answers.append(as_weft_error(error))
            await pair.settle(f"r{number}", CANCELLED)
            request.key.request_id += "-again"
        fingerprints.add(type(answers[0]))
        if isinstance(answers[0], pb.RouteResponse):
            assert answers[0] == answers[1]
        else:
            assert (type(answers[0]), str(answers[0])) == (type(answers[1]), str(answers[1]))
    assert fingerprints == {pb.RouteResponse, NotFound, InvalidRequest, PeerLost}


async def test_too_long_prompt_has_the_reason_clients_know(stream: RouteStream) -> None:
    for change, reason in ({"prompt_tokens": 5000}, "context_length_exceeded"), ({"prompt_tokens": 0}, None):
        with pytest.raises(InvalidRequest) as refused:
            await stream.request(route_request("r", **change))
        assert refused.value.reason == reason


async def test_loading_model_is_named_if_no_worker_serves_it(scheduler: Scheduler) -> None:
    loading = scheduler.fleet.Announce()
    arrival = pb.WorkerArrival(worker_id="decode-7", role=common_pb2.WORKER_ROLE_DECODE, model=MODEL)
    await loading.write(pb.AnnounceRequest(arrival=arrival))
    async with stream_to(scheduler) as stream, asyncio.timeout(20):
        while not (await scheduler.fleet.ListWorkers(pb.ListWorkersRequest())).arrivals:
            pass
        with pytest.raises(ModelLoading):
            await stream.request(route_request("r1"))
        with pytest.raises((NotFound, PeerLost)) as caught:
            await stream.request(route_request("r2", model="other"))
        assert not isinstance(caught.value, ModelLoading), "nobody loads that one"
        async with AsyncExitStack() as stack:
            await join(stack, scheduler, "prefill-0", "decode-0")
            await stream.request(route_request("r3"))
    loading.cancel()


async def test_every_request_of_a_burst_is_answered(pair: Scheduler, stream: RouteStream) -> None:
    asked = (stream.request(route_request(f"r{number}")) for number in range(600))
    answers = await asyncio.gather(*asked, return_exceptions=True)
    placed = [answer for answer in answers if isinstance(answer, pb.RouteResponse)]
    refused = [answer for answer in answers if isinstance(answer, Overloaded)]
    assert len(placed) + len(refused) == 600
    assert 0 < len(placed) == await booked(pair)
    assert all(error.retry_after_seconds >= 1 for error in refused)


async def test_hold_time_reaches_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(AffinityStore("", 60), queue=AdmissionQueue(8, 10.0)) as scheduler, AsyncExitStack() as stack:
        await join(stack, scheduler, "prefill-0", "decode-0")
        stream = await stack.enter_async_context(stream_to(scheduler))
        waiting: list[asyncio.Task[pb.RouteResponse]] = []
        while scheduler.dispatcher.num_waiting == 0:
            request = route_request(f"r{len(waiting)}", prompt_tokens=400, max_tokens=1)
            waiting.append(asyncio.create_task(stream.request(request)))
            await asyncio.wait(waiting, timeout=0.05)
        monkeypatch.setattr(AdmissionQueue, "expected_seconds", lambda *_: 9.0)
        with pytest.raises(QueueFull) as refused:
            await stream.request(route_request("late", prompt_tokens=400, max_tokens=1))
        assert (refused.value.retry_after_seconds, refused.value.hold_seconds) == (9.0, 0.5)
        for task in waiting:
            task.cancel()


async def test_withdrawn_request_leaves_the_queue() -> None:
    async with serving(AffinityStore("", 60), queue=AdmissionQueue(8, 10.0)) as scheduler, AsyncExitStack() as stack:
        await join(stack, scheduler, "prefill-0", "decode-0")
        stream = await stack.enter_async_context(stream_to(scheduler))
        async with asyncio.timeout(20):
            for number in range(100):
                waiting = asyncio.create_task(
                    stream.request(route_request(f"r{number}", prompt_tokens=400, max_tokens=1))
                )
                while not waiting.done() and scheduler.dispatcher.num_waiting == 0:  # noqa: ASYNC110 - told by nobody
                    await asyncio.sleep(0.01)
                if not waiting.done():
                    break
                await waiting
            with pytest.raises(Overloaded):
                await stream.request(route_request("impatient", prompt_tokens=400, reject_if_busy=True))
            assert not waiting.done()
            waiting.cancel()
            await asyncio.wait([waiting])
            with pytest.raises(Overloaded):  # there is still no room; but behind this answer the withdrawal has arrived
                await stream.request(route_request("second", prompt_tokens=400, reject_if_busy=True))
            before = await booked(scheduler)
            # the place that becomes free is for whoever comes next: the other one is gone
            await scheduler.settle("r0", CANCELLED)
            await stream.request(route_request("next", prompt_tokens=400, max_tokens=1))
            assert await booked(scheduler) == before


async def test_repeated_key_is_one_request() -> None:
    begun: list[str] = []

    async def route(request: pb.RouteRequest, gateway_id: str) -> tuple[PlacementDecision, float]:
        begun.append(request.key.request_id)
        await asyncio.Event().wait()
        raise AssertionError("cancelled before")

    asked, request = service._PendingRoutes(route), route_request("twice")
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        asked.start(group, request)
        await asyncio.sleep(0)
        asked.start(group, request)
        await asyncio.sleep(0)
        assert (begun, list(asked._tasks)) == (["twice", "twice"], [("twice", 0)])
        asked.cancel([request.key])
    assert not asked._tasks
    assert not asked._answers.results


async def test_unwritable_answer_fails_one_request_only() -> None:
    """An exception in its task would end the stream for all."""
    address = WorkerAddress("decode-0", "boot", "127.0.0.1:1")
    fingerprint = ModelFingerprint("w", "bfloat16", 16, 1, "v1")
    worker = Worker(WorkerHello(address, WorkerRole.DECODE, "m", fingerprint, 8, 128), 0.0)

    async def route(request: pb.RouteRequest, gateway_id: str) -> tuple[PlacementDecision, float]:
        seconds = float("inf") if request.key.request_id == "odd" else 1.0
        return PlacementDecision(worker, None, 1, 1, ttft_seconds=seconds), 0.0

    asked = service._PendingRoutes(route)
    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        asked.start(group, route_request("odd"))
        asked.start(group, route_request("even"))
    outcomes = [(each.key.request_id, each.WhichOneof("outcome")) for each in asked._answers.results]
    assert outcomes == [("odd", "refused"), ("even", "placed")]


async def test_reservations_of_a_closed_stream_are_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet, "ABSENT_SECONDS", 0.0)
    monkeypatch.setattr(dispatch, "SWEEP_SECONDS", 0.02)
    async with serving(AffinityStore("", 60)) as scheduler, AsyncExitStack() as stack:
        await join(stack, scheduler, "prefill-0", "decode-0")
        async with stream_to(scheduler) as lives:
            async with stream_to(scheduler) as dies:
                await asyncio.gather(lives.request(route_request("lives")), dies.request(route_request("dies")))
                await asyncio.sleep(0.1)  # some sweeps
                assert await booked(scheduler) == 2
            async with asyncio.timeout(10):
                while await booked(scheduler) == 2:  # noqa: ASYNC110 - told by nobody
                    await asyncio.sleep(0.01)
            assert await booked(scheduler) == 1


async def test_more_requests_in_a_message_than_allowed_end_the_stream(scheduler: Scheduler) -> None:
    async with cancelled_on_exit(scheduler.scheduler.RouteMany()) as call:
        await call.write(pb.RouteManyRequest(requests=[pb.RouteRequest()] * 1025))
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    async with cancelled_on_exit(scheduler.scheduler.RouteMany()) as call:
        await call.write(pb.RouteManyRequest(withdrawn=[common_pb2.RequestKey(request_id="nobody")]))
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK


async def test_broken_stream_fails_waiting_requests_and_reopens() -> None:
    nobody = RpcServer([])
    address = await nobody.start("127.0.0.1", 0)
    await nobody.stop(0)
    async with open_channel(address) as channel:
        stream = RouteStream(channel)
        running = asyncio.create_task(stream.run())
        for number in range(3):
            async with asyncio.timeout(10):
                with pytest.raises(StreamLost):
                    await stream.request(route_request(f"r{number}"))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_broken_stream_reopens_without_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else all that its gateway has under way would be given up."""
    monkeypatch.setattr(scheduler_client, "REOPEN_SECONDS", 0.05)
    async with serving(AffinityStore("", 60), silence_seconds=60.0) as scheduler, AsyncExitStack() as stack:
        router = scheduler.dispatcher.router
        await join(stack, scheduler, "prefill-0", "decode-0")
        stream = await stack.enter_async_context(stream_to(scheduler))
        await stream.request(route_request("long"))
        with monkeypatch.context() as patch:
            patch.setattr(service, "MAX_ROUTES", 0)
            with pytest.raises(StreamLost):
                await stream.request(route_request("breaks it"))
        # the broken one was no longer counted when its end was told
        async with asyncio.timeout(20):
            while not router.gateways._num_streams:  # noqa: ASYNC110 - told by nobody
                await asyncio.sleep(0.01)
        router.sweep(time.monotonic() + fleet.ABSENT_SECONDS + 5)
        assert await booked(scheduler) == 1


async def test_many_long_prompts_do_not_break_the_stream(stream: RouteStream) -> None:
    keys = [bytes(32)] * 16_384
    asked = (stream.request(route_request(f"r{number}", block_keys=keys, max_tokens=1)) for number in range(80))
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert {type(answer) for answer in answers} <= {pb.RouteResponse, Overloaded}


async def test_request_cancelled_before_it_was_sent_is_not_routed(monkeypatch: pytest.MonkeyPatch) -> None:
    placed: list[str] = []
    route = dispatch.Dispatcher.route

    async def noted(dispatcher: dispatch.Dispatcher, query: RouteQuery) -> PlacementDecision:
        placed.append(query.key.request_id)
        return await route(dispatcher, query)

    monkeypatch.setattr(dispatch.Dispatcher, "route", noted)
    async with serving(AffinityStore("", 60)) as scheduler, AsyncExitStack() as stack:
        await join(stack, scheduler, "prefill-0", "decode-0")
        stream = await stack.enter_async_context(stream_to(scheduler))
        leaving, staying = (asyncio.create_task(stream.request(route_request(name))) for name in ("leaves", "stays"))
        await asyncio.sleep(0)
        leaving.cancel()
        await staying
        await stream.request(route_request("next"))
        assert placed == ["stays", "next"]
