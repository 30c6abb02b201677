"""`weft drain` and `weft undrain`: asks the scheduler to take a worker out of service, or back. Knows nothing of
meshes."""

from __future__ import annotations

import asyncio

import grpc
import typer

from weft.cli.status import DEADLINE_SECONDS, explain
from weft.rpc.client import open_channel
from weft_mesh.v1 import scheduler_service_pb2 as pb
from weft_mesh.v1 import scheduler_service_pb2_grpc as pb_grpc


def drain(scheduler: str, worker_id: str, undo: bool) -> None:
    """Raises typer.Exit(1) after saying on stderr what is wrong."""
    command = "undrain" if undo else "drain"
    try:
        asyncio.run(_ask(scheduler, worker_id, undo))
    except grpc.aio.AioRpcError as error:
        known = error.code() is grpc.StatusCode.NOT_FOUND
        why = f"{error.details()}; `weft status` lists them" if known else explain(scheduler, error)
        typer.secho(f"weft {command}: {why}", fg="red", err=True)
        raise typer.Exit(1) from None
    what = "takes requests again" if undo else "finishes what it has and is given nothing new"
    typer.echo(f"{worker_id} {what}; `weft status --watch` shows it")


async def _ask(scheduler: str, worker_id: str, undo: bool) -> None:
    async with open_channel(scheduler) as channel:
        request = pb.DrainRequest(worker_id=worker_id, undo=undo)
        await pb_grpc.FleetServiceStub(channel).Drain(request, timeout=DEADLINE_SECONDS)
