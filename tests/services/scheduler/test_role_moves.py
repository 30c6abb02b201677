"""Workers that are asked to drain or to play another role: told until they say that they do, and refused what they
cannot."""

from __future__ import annotations

from contextlib import AsyncExitStack

import grpc
import pytest

from tests.services.scheduler.fakes import FakeWorker, Scheduler, code_of, hello, join
from weft_mesh.v1 import common_pb2
from weft_mesh.v1 import scheduler_service_pb2 as pb

FINISHED = pb.Settlement.STAGE_FINISHED


async def told(worker: FakeWorker) -> pb.JoinResponse:
    answer = await worker.call.read()
    assert isinstance(answer, pb.JoinResponse)
    return answer


@pytest.mark.parametrize(("command", "field", "reported"), [("Drain", "drain", "draining"), ("Park", "park", "parked")])
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


async def test_last_worker_of_a_role_parks_only_if_told_so(pair: Scheduler) -> None:
    last = pb.ParkRequest(worker_id="decode-0")
    code, said = await code_of(pair.fleet.Park(last))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "decode-0 is the last decode worker of 'weft-nano' that takes requests" in said
    async with FakeWorker(pair, hello("decode-1", "decode", "d1-boot")) as worker:
        await worker.report(ready=False, parked=True)
        code, _ = await code_of(pair.fleet.Park(last))
        assert code is grpc.StatusCode.INVALID_ARGUMENT, "a parked worker serves nothing"
        await pair.fleet.Park(pb.ParkRequest(worker_id="decode-0", even_last=True))


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
