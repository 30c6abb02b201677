"""The weights service in the test's loop, and as a process."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import grpc

from weft.rpc.client import cancelled_on_exit, open_channel
from weft.rpc.server import RpcServer
from weft_mesh.v1 import weights_service_pb2 as pb2
from weft_mesh.v1 import weights_service_pb2_grpc as pb2_grpc
from weft_services.weights.loader import WeightLoader
from weft_services.weights.peers import WeightsPeer
from weft_services.weights.service import SERVICE_NAME, WeightServicer

MODEL = "tiny"
PATIENCE_SECONDS = 20.0


@asynccontextmanager
async def listening(directory: Path, peer_address: str = "") -> AsyncIterator[str]:
    """The service, which may have a peer; its address."""
    rpc = RpcServer([SERVICE_NAME])
    peer = WeightsPeer(peer_address, MODEL) if peer_address else None
    async with asyncio.TaskGroup() as tasks:
        loader = WeightLoader(directory, 2, tasks, peer)
        pb2_grpc.add_WeightServiceServicer_to_server(WeightServicer({MODEL: loader}), rpc.server)
        address = await rpc.start("127.0.0.1", 0)
        try:
            yield address
        finally:
            await rpc.stop(0)
            loader.release()
            if peer is not None:
                await peer.close()


@asynccontextmanager
async def serving(directory: Path, peer_address: str = "") -> AsyncIterator[grpc.aio.Channel]:
    """The same, and a channel to it."""
    async with listening(directory, peer_address) as address, open_channel(address) as channel:
        yield channel


async def load(
    channel: grpc.aio.Channel, model: str = MODEL, heard: asyncio.Event | None = None
) -> list[pb2.LoadResponse]:
    """Everything that one Load says; `heard` is set at the first of it."""
    responses = []
    stub: pb2_grpc.WeightServiceAsyncStub = pb2_grpc.WeightServiceStub(channel)
    async with cancelled_on_exit(stub.Load(pb2.LoadRequest(model=model), timeout=PATIENCE_SECONDS)) as call:
        async for response in call:
            responses.append(response)
            if heard is not None:
                heard.set()
    return responses


def start(directory: Path, begun_by: Sequence[str] = (), **settings: str) -> subprocess.Popen[str]:
    """The process; `begun_by`: a command that becomes it."""
    own = {"WEFT_MODEL": str(directory), "WEFT_MODEL_NAME": MODEL, "WEFT_THREADS": "1"}
    command = [*begun_by, sys.executable, "-m", "weft_services.weights"]
    return subprocess.Popen(command, env={**os.environ, **own, **settings}, stderr=subprocess.PIPE, text=True)


def line_with(process: subprocess.Popen[str], words: str) -> str:
    """Its next log line with these words."""
    assert process.stderr is not None
    for line in process.stderr:
        if words in line:
            return line
    raise AssertionError(f"ended without a word of {words!r}")
