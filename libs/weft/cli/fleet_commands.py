"""Commands that change a running worker through the scheduler: `weft drain`, `undrain`, `sleep`, `wake`, `set-role`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
import typer

from weft.cli.status import DEADLINE_SECONDS, explain
from weft.request import WorkerRole
from weft.rpc.client import open_channel
from weft.rpc.wire import role_from_wire, role_to_wire
from weft_mesh.v1 import scheduler_service_pb2 as pb
from weft_mesh.v1 import scheduler_service_pb2_grpc as pb_grpc

ResultT = TypeVar("ResultT")
REJOIN_SECONDS, RETRY_SECONDS = 3.0, 0.2


def drain(scheduler: str, worker_id: str, undo: bool) -> None:
    """Ask the scheduler; print the effect. Raises typer.Exit(1) after an error message."""
    request = pb.DrainRequest(worker_id=worker_id, undo=undo)
    lacking, is_asleep = _call_scheduler(
        "undrain" if undo else "drain", scheduler, lambda fleet: _drained(fleet, request)
    )
    what = "takes requests again" if undo else "finishes its requests and gets no new ones"
    if is_asleep:
        awake = f"`weft wake {worker_id}` loads its model" if undo else "once awake it gets no new requests"
        what = f"is asleep: {awake}"
    typer.echo(f"{worker_id} {what}; `weft status --watch` shows it")
    if lacking:
        why = f"no other worker is ready for {' and '.join(lacking)}: requests may be rejected until one is"
        typer.secho(f"{why}; `weft undrain {worker_id}` takes it back", fg="yellow", err=True)


async def _drained(fleet: Any, request: pb.DrainRequest) -> tuple[list[str], bool]:
    """Return the roles that no other ready worker has, and whether the worker is asleep."""
    await fleet.Drain(request, timeout=DEADLINE_SECONDS)
    workers = (await fleet.ListWorkers(pb.ListWorkersRequest(), timeout=DEADLINE_SECONDS)).workers
    own = [each for each in workers if each.hello.worker.worker_id == request.worker_id]
    is_asleep = any(each.report.asleep for each in own)
    if request.undo:
        return [], is_asleep
    models = {each.hello.model for each in own}
    others = [each for each in workers if each not in own and each.hello.model in models and _takes_work(each.report)]
    return [
        role.value
        for role in (WorkerRole.PREFILL, WorkerRole.DECODE)
        if any(role_from_wire(each.hello.role).can(role) for each in own)
        and not any(role_from_wire(each.hello.role).can(role) for each in others)
    ], is_asleep


def _takes_work(report: pb.WorkerReport) -> bool:
    return report.ready or report.full


def sleep(scheduler: str, worker_id: str, even_last: bool) -> None:
    """Ask the scheduler; print the effect. Raises typer.Exit(1) after an error message."""
    request = pb.SleepRequest(worker_id=worker_id, even_last=even_last)
    _call_scheduler("sleep", scheduler, lambda fleet: _retry_until_joined(fleet.Sleep, request))
    typer.echo(
        f"{worker_id} finishes its requests and releases its memory; `weft wake {worker_id}` loads its model again"
    )


def wake(scheduler: str, worker_id: str) -> None:
    """Ask the scheduler; print the effect. Raises typer.Exit(1) after an error message."""
    request = pb.SleepRequest(worker_id=worker_id, undo=True)
    is_asleep = _call_scheduler("wake", scheduler, lambda fleet: _woken(fleet, request))
    what = "loads its model again" if is_asleep else "is not asleep, and stays so"
    typer.echo(f"{worker_id} {what}; `weft status --watch` shows when it is ready")


async def _woken(fleet: Any, request: pb.SleepRequest) -> bool:
    """Wake the worker; return whether it was asleep. A draining or full worker has its model loaded."""
    await _retry_until_joined(fleet.Sleep, request)
    workers = (await fleet.ListWorkers(pb.ListWorkersRequest(), timeout=DEADLINE_SECONDS)).workers
    own = [each.report for each in workers if each.hello.worker.worker_id == request.worker_id]
    is_loaded = [report.ready or report.full or report.draining for report in own]
    return not all(is_loaded) or any(report.asleep for report in own) or not own


def set_role(scheduler: str, worker_id: str, role: str) -> None:
    """Ask the scheduler; print the effect. Raises typer.Exit(1) after an error message."""
    request = pb.SetRoleRequest(worker_id=worker_id, role=role_to_wire(WorkerRole(role)))
    _call_scheduler("set-role", scheduler, lambda fleet: _retry_until_joined(fleet.SetRole, request))
    typer.echo(f"{worker_id} is asked to take the role {role}; `weft status --watch` shows it")


async def _retry_until_joined(call: Callable[..., Awaitable[Any]], request: Any) -> None:
    """Retry NOT_FOUND for REJOIN_SECONDS: a worker that falls asleep or wakes leaves the fleet for a moment."""
    deadline = time.monotonic() + REJOIN_SECONDS
    while True:
        try:
            await call(request, timeout=DEADLINE_SECONDS)
            return
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND or time.monotonic() >= deadline:
                raise
        await asyncio.sleep(RETRY_SECONDS)


def _call_scheduler(command: str, scheduler: str, call: Callable[[Any], Awaitable[ResultT]]) -> ResultT:
    try:
        return asyncio.run(_ask(scheduler, call))
    except grpc.aio.AioRpcError as error:
        why = explain(scheduler, error)
        if error.code() is grpc.StatusCode.NOT_FOUND:
            lists = "unless it is loading its model; `weft status --watch` lists them"
            is_patient = command in ("sleep", "wake", "set-role")
            why = f"{error.details()}, {lists}" if is_patient else f"{error.details()}; `weft status` lists them"
        elif error.code() is grpc.StatusCode.INVALID_ARGUMENT:
            why = (error.details() or why) + ("; --even-last lets it sleep all the same" if command == "sleep" else "")
        typer.secho(f"weft {command}: {why}", fg="red", err=True)
        raise typer.Exit(1) from None


async def _ask(scheduler: str, call: Callable[[Any], Awaitable[ResultT]]) -> ResultT:
    async with open_channel(scheduler) as channel:
        return await call(pb_grpc.FleetServiceStub(channel))
