"""What the scheduler refuses to hear: memberships that start wrong, and calls beyond their bounds."""

from __future__ import annotations

import grpc
import pytest

from tests.services.scheduler.fakes import FakeWorker, Scheduler, code_of, hello
from weft_mesh.v1 import common_pb2
from weft_mesh.v1 import scheduler_service_pb2 as pb

FINISHED = pb.Settlement.STAGE_FINISHED
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


async def test_settlements_beyond_their_bounds_are_refused_whole(scheduler: Scheduler) -> None:
    good = pb.Settlement(key=common_pb2.RequestKey(request_id="r"), stage=FINISHED)
    for bad in ([good] * 1025, [good, pb.Settlement(key=good.key)], [pb.Settlement(stage=FINISHED)]):
        code, _ = await code_of(scheduler.scheduler.Settle(pb.SettleRequest(settlements=bad)))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
    await scheduler.scheduler.Settle(pb.SettleRequest(settlements=[good] * 1024))


async def test_a_role_that_nobody_knows_is_refused_and_no_bug(scheduler: Scheduler) -> None:
    async with FakeWorker(scheduler, hello("decode-0", "decode", can_change_role=True)) as worker:
        code, details = await code_of(scheduler.fleet.SetRole(pb.SetRoleRequest(worker_id="decode-0", role=9)))  # type: ignore[arg-type]
        assert (code, details) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "role: unknown role 9; expected prefill, decode or both",
        )
        await worker.call.write(pb.JoinRequest(report=pb.WorkerReport(role=9)))  # type: ignore[arg-type]
        assert await worker.call.code() is grpc.StatusCode.INVALID_ARGUMENT
