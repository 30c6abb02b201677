"""Workers that are asked to drain or to play another role: told until they say that they do, and refused what they
cannot."""

from __future__ import annotations

from contextlib import AsyncExitStack

import grpc

from tests.services.scheduler.fakes import FakeWorker, Scheduler, code_of, hello, join
from weft_mesh.v1 import common_pb2
from weft_mesh.v1 import scheduler_service_pb2 as pb

FINISHED = pb.Settlement.STAGE_FINISHED


async def test_a_worker_is_told_to_drain_until_it_says_that_it_does(scheduler: Scheduler) -> None:
    async with AsyncExitStack() as stack:
        await join(stack, scheduler, "prefill-0", "decode-0")
        worker = await stack.enter_async_context(FakeWorker(scheduler, hello("decode-1", "decode", "d1-boot")))
        await scheduler.fleet.Drain(pb.DrainRequest(worker_id="decode-1"))
        for number in range(4):
            assert (await scheduler.route(f"r{number}", prompt_tokens=5)).decode.worker_id == "decode-0"
        await worker.report()
        told = await worker.call.read()
        assert isinstance(told, pb.JoinResponse)
        assert told.drain
        await worker.report(ready=False, draining=True)
        await scheduler.fleet.Drain(pb.DrainRequest(worker_id="decode-1", undo=True))
        await worker.report(ready=False, draining=True)
        told = await worker.call.read()
        assert isinstance(told, pb.JoinResponse)
        assert told.HasField("drain")
        assert not told.drain
        await worker.report()
        chosen = {(await scheduler.route(f"s{number}", prompt_tokens=5)).decode.worker_id for number in range(4)}
        assert "decode-1" in chosen
        code, _ = await code_of(scheduler.fleet.Drain(pb.DrainRequest(worker_id="nobody")))
        assert code is grpc.StatusCode.NOT_FOUND


async def test_a_worker_is_told_to_park_until_it_says_that_it_does_and_the_last_of_its_role_is_not(
    scheduler: Scheduler,
) -> None:
    async with AsyncExitStack() as stack:
        await join(stack, scheduler, "prefill-0", "decode-0")
        code, said = await code_of(scheduler.fleet.Park(pb.ParkRequest(worker_id="decode-0")))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "decode-0 is the last decode worker of 'weft-nano' that takes requests" in said
        worker = await stack.enter_async_context(FakeWorker(scheduler, hello("decode-1", "decode", "d1-boot")))
        await scheduler.fleet.Park(pb.ParkRequest(worker_id="decode-1"))
        for number in range(4):
            assert (await scheduler.route(f"r{number}", prompt_tokens=5)).decode.worker_id == "decode-0"
        await worker.report()
        told = await worker.call.read()
        assert isinstance(told, pb.JoinResponse)
        assert told.park
        await worker.report(ready=False, parked=True)
        code, _ = await code_of(scheduler.fleet.Park(pb.ParkRequest(worker_id="decode-0")))
        assert code is grpc.StatusCode.INVALID_ARGUMENT, "who is parked does nothing"
        await scheduler.fleet.Park(pb.ParkRequest(worker_id="decode-0", even_last=True))
        await scheduler.fleet.Park(pb.ParkRequest(worker_id="decode-0", undo=True))
        await scheduler.fleet.Park(pb.ParkRequest(worker_id="decode-1", undo=True))
        await worker.report(ready=False, parked=True)
        told = await worker.call.read()
        assert isinstance(told, pb.JoinResponse)
        assert (told.HasField("park"), told.park) == (True, False)
        await worker.report()
        chosen = {(await scheduler.route(f"s{number}", prompt_tokens=5)).decode.worker_id for number in range(4)}
        assert "decode-1" in chosen
        code, _ = await code_of(scheduler.fleet.Park(pb.ParkRequest(worker_id="nobody")))
        assert code is grpc.StatusCode.NOT_FOUND


async def test_a_worker_plays_another_role_from_its_next_report_on_and_keeps_what_it_has(scheduler: Scheduler) -> None:
    async with AsyncExitStack() as stack:
        await join(stack, scheduler, "prefill-0", "decode-0")
        changing = hello("decode-1", "decode", "d1-boot", can_change_role=True)
        worker = await stack.enter_async_context(FakeWorker(scheduler, changing))
        placed = {(await scheduler.route(f"r{number}")).decode.worker_id: f"r{number}" for number in range(4)}
        assert set(placed) == {"decode-0", "decode-1"}
        prefill = common_pb2.WORKER_ROLE_PREFILL
        await scheduler.fleet.SetRole(pb.SetRoleRequest(worker_id="decode-1", role=prefill))
        await worker.report(role=common_pb2.WORKER_ROLE_DECODE)
        told = await worker.call.read()
        assert isinstance(told, pb.JoinResponse)
        assert (told.role, told.HasField("drain")) == (prefill, False)
        await worker.report(role=prefill)
        listed = {each.hello.worker.worker_id: each for each in await scheduler.listed()}
        assert listed["decode-1"].hello.role == prefill
        assert listed["decode-1"].booked_requests > 0
        after = [await scheduler.route(f"s{number}", prompt_tokens=200) for number in range(4)]
        assert {answer.decode.worker_id for answer in after} == {"decode-0"}
        assert "decode-1" in {answer.prefill.worker_id for answer in after}
        await scheduler.settle(placed["decode-1"], FINISHED)


async def test_a_role_that_cannot_or_must_not_change_is_refused(scheduler: Scheduler) -> None:
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
