"""FleetService and bounds of both services over gRPC: commands to workers, loading workers, invalid messages."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest

from tests.services.scheduler.fakes import MODEL, FakeWorker, Scheduler, code_of, hello, join, serving
from weft.errors import Overloaded
from weft.fleet_types import LoadingWorker
from weft.request import WorkerRole
from weft_mesh.v1 import common_pb2
from weft_mesh.v1 import scheduler_service_pb2 as pb
from weft_services.scheduler.affinity import AffinityStore
from weft_services.scheduler.fleet import MAX_ARRIVALS, LoadingWorkers

FINISHED = pb.Settlement.STAGE_FINISHED


async def told(worker: FakeWorker) -> pb.JoinResponse:
    answer = await worker.call.read()
    assert isinstance(answer, pb.JoinResponse)
    return answer


@pytest.mark.parametrize(
    ("command", "field", "reported"), [("Drain", "drain", "draining"), ("Sleep", "sleep", "asleep")]
)
async def test_worker_is_asked_until_it_reports_the_change(
    pair: Scheduler, command: str, field: str, reported: str
) -> None:
    async def ask(worker_id: str = "decode-1", **more: bool) -> None:
        await getattr(pair.fleet, command)(getattr(pb, f"{command}Request")(worker_id=worker_id, **more))

    async with FakeWorker(pair, hello("decode-1", "decode", "d1-boot")) as worker:
        await ask()
        for number in range(4):
            assert (await pair.route(f"r{number}", prompt_tokens=5)).decode.worker_id == "decode-0"
        await worker.report()
        assert getattr(await told(worker), field)
        await worker.report(ready=False, **{reported: True})
        await ask(undo=True)
        await worker.report(ready=False, **{reported: True})
        answer = await told(worker)
        assert (answer.HasField(field), getattr(answer, field)) == (True, False)  # type: ignore[arg-type]
        await worker.report()
        chosen = {(await pair.route(f"s{number}", prompt_tokens=5)).decode.worker_id for number in range(4)}
        assert "decode-1" in chosen
        code, _ = await code_of(ask("nobody"))
        assert code is grpc.StatusCode.NOT_FOUND


async def test_last_worker_of_a_role_sleeps_only_if_told_so(pair: Scheduler) -> None:
    last = pb.SleepRequest(worker_id="decode-0")
    code, said = await code_of(pair.fleet.Sleep(last))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "decode-0 is the last decode worker of 'weft-nano' that takes requests" in said
    async with FakeWorker(pair, hello("decode-1", "decode", "d1-boot")) as worker:
        await worker.report(ready=False, asleep=True)
        code, _ = await code_of(pair.fleet.Sleep(last))
        assert code is grpc.StatusCode.INVALID_ARGUMENT, "a sleeping worker serves nothing"
        await pair.fleet.Sleep(pb.SleepRequest(worker_id="decode-0", even_last=True))


async def test_role_changes_with_the_next_report_and_keeps_reservations(pair: Scheduler) -> None:
    async with AsyncExitStack() as stack:
        changing = hello("decode-1", "decode", "d1-boot", can_change_role=True)
        worker = await stack.enter_async_context(FakeWorker(pair, changing))
        placed = {(await pair.route(f"r{number}")).decode.worker_id: f"r{number}" for number in range(4)}
        assert set(placed) == {"decode-0", "decode-1"}
        prefill = common_pb2.WORKER_ROLE_PREFILL
        await pair.fleet.SetRole(pb.SetRoleRequest(worker_id="decode-1", role=prefill))
        await worker.report(role=common_pb2.WORKER_ROLE_DECODE)
        answer = await told(worker)
        assert (answer.role, answer.HasField("drain")) == (prefill, False)
        await worker.report(role=prefill)
        listed = {each.hello.worker.worker_id: each for each in await pair.listed()}
        assert listed["decode-1"].hello.role == prefill
        assert listed["decode-1"].booked_requests > 0
        after = [await pair.route(f"s{number}", prompt_tokens=200) for number in range(4)]
        assert {answer.decode.worker_id for answer in after} == {"decode-0"}
        assert "decode-1" in {answer.prefill.worker_id for answer in after}
        await pair.settle(placed["decode-1"], FINISHED)


async def test_impossible_role_change_is_rejected(scheduler: Scheduler) -> None:
    decode, prefill = common_pb2.WORKER_ROLE_DECODE, common_pb2.WORKER_ROLE_PREFILL
    async with AsyncExitStack() as stack:
        await join(stack, scheduler, "prefill-0")
        for name in ("decode-0", "decode-1"):
            changing = hello(name, "decode", f"{name}-boot", can_change_role=True)
            await stack.enter_async_context(FakeWorker(scheduler, changing))
        asked = [("prefill-0", decode, "can only run as prefill"), ("nobody", decode, "no worker 'nobody'")]
        for name, role, why in asked:
            code, details = await code_of(scheduler.fleet.SetRole(pb.SetRoleRequest(worker_id=name, role=role)))
            assert why in details
        await scheduler.fleet.SetRole(pb.SetRoleRequest(worker_id="decode-0", role=prefill))
        # it has not changed yet, but it will
        code, details = await code_of(scheduler.fleet.SetRole(pb.SetRoleRequest(worker_id="decode-1", role=prefill)))
        assert (code, "last decode worker" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        code, _ = await code_of(scheduler.fleet.SetRole(pb.SetRoleRequest(worker_id="decode-0")))
        assert code is grpc.StatusCode.INVALID_ARGUMENT


def arrival(worker_id: str = "decode-7", **changes: Any) -> pb.AnnounceRequest:
    fields = {"role": common_pb2.WORKER_ROLE_DECODE, "model": MODEL, "phase": "reading weights", "total_bytes": 100}
    return pb.AnnounceRequest(arrival=pb.WorkerArrival(worker_id=worker_id, **{**fields, **changes}))


async def until_announced(scheduler: Scheduler, *expected: tuple[str, int]) -> None:
    """Ids and bytes done of who is awaited; a message takes its time."""
    async with asyncio.timeout(20):
        while True:
            fleet = await scheduler.fleet.ListWorkers(pb.ListWorkersRequest())
            if [(each.worker_id, each.done_bytes) for each in fleet.arrivals] == [*expected]:
                return


async def test_a_worker_that_loads_is_listed_until_it_joins_or_goes(scheduler: Scheduler) -> None:
    loading, other = scheduler.fleet.Announce(), scheduler.fleet.Announce()
    await other.write(arrival("decode-8", done_bytes=3))
    await loading.write(arrival(done_bytes=1))
    await until_announced(scheduler, ("decode-7", 1), ("decode-8", 3))
    await loading.write(arrival(done_bytes=99))
    await until_announced(scheduler, ("decode-7", 99), ("decode-8", 3))
    assert (await code_of(scheduler.route("r1")))[0] is grpc.StatusCode.UNAVAILABLE, "nothing is placed there"
    async with FakeWorker(scheduler, hello("decode-7", "decode")):
        await until_announced(scheduler, ("decode-8", 3))
    other.cancel()
    await until_announced(scheduler, ("decode-7", 99))
    await loading.done_writing()
    assert await loading == pb.AnnounceResponse()
    await until_announced(scheduler)


async def test_of_two_announcements_of_one_worker_the_later_counts(scheduler: Scheduler) -> None:
    dying, again = scheduler.fleet.Announce(), scheduler.fleet.Announce()
    await dying.write(arrival(done_bytes=90))
    await until_announced(scheduler, ("decode-7", 90))
    await again.write(arrival(done_bytes=1))
    await until_announced(scheduler, ("decode-7", 1))
    await dying.done_writing()
    await dying
    await until_announced(scheduler, ("decode-7", 1))
    again.cancel()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"worker_id": "../7"}, "worker_id"),
        ({"role": common_pb2.WORKER_ROLE_UNSPECIFIED}, "role"),
        ({"model": "m" * 257}, "arrival.model"),
        ({"phase": "p" * 257}, "arrival.phase"),
    ],
)
async def test_an_announcement_that_is_wrong_is_refused(
    scheduler: Scheduler, changes: dict[str, Any], field: str
) -> None:
    call = scheduler.fleet.Announce()
    await call.write(arrival(**changes))
    code, details = await code_of(call)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert field in details
    await until_announced(scheduler)


async def test_a_silent_announcement_is_given_up() -> None:
    async with serving(AffinityStore("", 60), silence_seconds=0.2) as scheduler:
        call = scheduler.fleet.Announce()
        await call.write(arrival())
        assert (await code_of(call))[0] is grpc.StatusCode.DEADLINE_EXCEEDED
        await until_announced(scheduler)


def test_number_of_loading_workers_is_bounded() -> None:
    arrivals = LoadingWorkers(lambda: 5.0)
    for number in range(MAX_ARRIVALS):
        arrivals.update(arrivals.begin(), LoadingWorker(f"w-{number}", WorkerRole.DECODE, MODEL, "starting"))
    with pytest.raises(Overloaded):
        arrivals.update(arrivals.begin(), LoadingWorker("another", WorkerRole.DECODE, MODEL, "starting"))
    assert len(arrivals.loading()) == MAX_ARRIVALS


# the field that is said last counts
_NEWER = hello("a", "decode").SerializeToString() + pb.WorkerHello(role=9).SerializeToString()  # type: ignore[arg-type]
BAD_FIRST = {
    "report first": pb.JoinRequest(report=pb.WorkerReport()),
    "nothing": pb.JoinRequest(),
    "no role": pb.JoinRequest(hello=pb.WorkerHello(worker=pb.WorkerAddress(worker_id="a", boot_id="b", address="c:1"))),
    "a role of a newer version": pb.JoinRequest(hello=pb.WorkerHello.FromString(_NEWER)),
    "an id with spaces": pb.JoinRequest(hello=hello("a b", "decode")),
    "an id with a newline": pb.JoinRequest(hello=hello("a\n", "decode")),
    "no blocks": pb.JoinRequest(hello=hello("a", "decode", num_blocks=0)),
}


@pytest.mark.parametrize("message", BAD_FIRST.values(), ids=BAD_FIRST.keys())
async def test_a_membership_that_starts_wrong_is_refused(scheduler: Scheduler, message: pb.JoinRequest) -> None:
    call = scheduler.fleet.Join()
    await call.write(message)
    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert await scheduler.listed() == []


async def test_a_membership_that_ends_before_hello_is_refused(scheduler: Scheduler) -> None:
    call = scheduler.fleet.Join()
    await call.done_writing()
    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_second_hello_ends_the_membership(scheduler: Scheduler) -> None:
    async with FakeWorker(scheduler, hello("decode-0", "decode")) as worker:
        await worker.call.write(pb.JoinRequest(hello=hello("decode-0", "decode")))
        assert await worker.call.code() is grpc.StatusCode.INVALID_ARGUMENT


GOOD_KEY = common_pb2.RequestKey(request_id="r")
BAD_ROUTES = {
    "session": pb.RouteRequest(key=GOOD_KEY, prompt_tokens=1, session=b"x" * 65),
    "block_keys": pb.RouteRequest(key=GOOD_KEY, prompt_tokens=1, block_keys=[b""] * 65_537),
    "excluded_worker_ids": pb.RouteRequest(key=GOOD_KEY, prompt_tokens=1, excluded_worker_ids=["w"] * 65),
    "model": pb.RouteRequest(key=GOOD_KEY, prompt_tokens=1, model="m" * 257),
    "prompt_tokens": pb.RouteRequest(key=GOOD_KEY),
    "key.request_id": pb.RouteRequest(prompt_tokens=1),
    "excluded_boot_ids": pb.RouteRequest(key=GOOD_KEY, prompt_tokens=1, excluded_boot_ids=["b"] * 65),
}


@pytest.mark.parametrize(("param", "request_"), BAD_ROUTES.items(), ids=BAD_ROUTES.keys())
async def test_a_route_beyond_its_bounds_is_refused_by_name(
    scheduler: Scheduler, param: str, request_: pb.RouteRequest
) -> None:
    code, details = await code_of(scheduler.scheduler.Route(request_))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert param in details


async def test_invalid_settlements_are_rejected_as_a_whole(scheduler: Scheduler) -> None:
    good = pb.Settlement(key=common_pb2.RequestKey(request_id="r"), stage=FINISHED)
    for bad in ([good] * 1025, [good, pb.Settlement(key=good.key)], [pb.Settlement(stage=FINISHED)]):
        code, _ = await code_of(scheduler.scheduler.Settle(pb.SettleRequest(settlements=bad)))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
    await scheduler.scheduler.Settle(pb.SettleRequest(settlements=[good] * 1024))


async def test_unknown_role_is_an_invalid_argument(scheduler: Scheduler) -> None:
    async with FakeWorker(scheduler, hello("decode-0", "decode", can_change_role=True)) as worker:
        code, details = await code_of(scheduler.fleet.SetRole(pb.SetRoleRequest(worker_id="decode-0", role=9)))  # type: ignore[arg-type]
        assert (code, details) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "role: unknown role 9; expected prefill, decode or both",
        )
        await worker.call.write(pb.JoinRequest(report=pb.WorkerReport(role=9)))  # type: ignore[arg-type]
        assert await worker.call.code() is grpc.StatusCode.INVALID_ARGUMENT
