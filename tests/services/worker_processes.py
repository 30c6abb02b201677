"""A worker's whole process in the test's loop, and a scheduler and weights service in a few lines beside it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.weft.tiny_llama import Tiny
from weft.capacity.sizes import BLOCK_TOKENS
from weft.options import TransportChoice
from weft.request import WorkerAddress
from weft.rpc.client import open_channel
from weft.rpc.server import SERVING, RpcServer
from weft.weights.checkpoint import read_checkpoint
from weft.weights.image import Image, write_image
from weft.worker.config import WorkerConfig
from weft.worker.process import RoleService, serve_worker
from weft_mesh.v1 import scheduler_service_pb2 as fleet_pb2
from weft_mesh.v1 import scheduler_service_pb2_grpc, weights_service_pb2_grpc
from weft_mesh.v1 import weights_service_pb2 as weights_pb2
from weft_services.decode.service import DECODE_ROLE as DECODE


class Peers(scheduler_service_pb2_grpc.FleetServiceServicer, weights_service_pb2_grpc.WeightServiceServicer):
    """Scheduler and weights service in a few lines; joining can be held up."""

    def __init__(self, image: Image, config_json: str) -> None:
        self.image = image
        self.config_json = config_json
        self.said: asyncio.Queue[fleet_pb2.JoinRequest] = asyncio.Queue()
        self.may_join = asyncio.Event()
        self.announced: asyncio.Queue[fleet_pb2.WorkerArrival] = asyncio.Queue()
        self.announcement_ended = asyncio.Event()

    async def Join(self, request_iterator: Any, context: Any) -> AsyncIterator[fleet_pb2.JoinResponse]:
        async for request in request_iterator:
            self.said.put_nowait(request)
            if request.WhichOneof("message") == "hello":
                await self.may_join.wait()
                yield fleet_pb2.JoinResponse(report_interval_ms=20)

    async def Announce(self, request_iterator: Any, context: Any) -> fleet_pb2.AnnounceResponse:
        async for request in request_iterator:
            self.announced.put_nowait(request.arrival)
        self.announcement_ended.set()
        return fleet_pb2.AnnounceResponse()

    async def SetRole(self, request: Any, context: Any) -> Any:
        raise AssertionError("workers do not ask")

    async def Sleep(self, request: Any, context: Any) -> fleet_pb2.SleepResponse:
        raise AssertionError("workers do not ask")

    async def ListWorkers(self, request: Any, context: Any) -> fleet_pb2.ListWorkersResponse:
        raise AssertionError("workers do not ask")

    async def Drain(self, request: Any, context: Any) -> fleet_pb2.DrainResponse:
        raise AssertionError("workers do not ask")

    async def DescribeImage(self, request: Any, context: Any) -> weights_pb2.DescribeImageResponse:
        raise AssertionError("workers do not ask")

    def ReadImage(self, request: Any, context: Any) -> AsyncIterator[weights_pb2.ReadImageResponse]:
        raise AssertionError("workers do not ask")

    async def Load(self, request: Any, context: Any) -> AsyncIterator[weights_pb2.LoadResponse]:
        yield weights_pb2.LoadResponse(
            ready=weights_pb2.LoadReady(
                shm_name=self.image.name,
                size_bytes=self.image.size_bytes,
                weights_hash=self.image.weights_hash,
                config_json=self.config_json,
            )
        )


@dataclass
class Process:
    """A worker that runs as a task, and what it told the scheduler."""

    peers: Peers
    task: asyncio.Task[None]
    hello: fleet_pb2.WorkerHello

    @property
    def address(self) -> WorkerAddress:
        return WorkerAddress(self.hello.worker.worker_id, self.hello.worker.boot_id, self.hello.worker.address)

    async def health(self) -> int:
        """As a probe sees it."""
        channel = open_channel(self.hello.worker.address)
        try:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest())
            return int(answer.status)
        finally:
            await channel.close()

    async def until_serving(self) -> None:
        """Joining lets it take work."""
        self.peers.may_join.set()
        async with asyncio.timeout(20):
            while await self.health() != SERVING:
                pass


@asynccontextmanager
async def start_process(
    tiny: Tiny, posts: Sequence[RoleService] = (DECODE,), name: str = "decode-7", scheduler: str = "", **more: Any
) -> AsyncIterator[Process]:
    """`more`: of the worker's settings. `scheduler`: another one that it joins."""
    checkpoint = read_checkpoint(tiny.directory)
    image = write_image(checkpoint, lambda *progress: None, 1)
    peers, rpc = Peers(image, checkpoint.config_json), RpcServer([])
    scheduler_service_pb2_grpc.add_FleetServiceServicer_to_server(peers, rpc.server)
    weights_service_pb2_grpc.add_WeightServiceServicer_to_server(peers, rpc.server)
    async with AsyncExitStack() as stack:
        # its goodbye is waited for until it is heard
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr("weft.worker.process.LEAVE_SECONDS", 10.0)
        patch.setitem(BLOCK_TOKENS, "cpu", 4)
        stack.callback(image.release)
        address = await rpc.start("127.0.0.1", 0)
        stack.push_async_callback(rpc.stop, 0)
        config = WorkerConfig(
            worker_id=name,
            scheduler_addr=f"{address},{scheduler}" if scheduler else address,
            weights_addr=address,
            model_name="tiny",
            num_blocks=32,
            transport=TransportChoice.GRPC,
            **{"grace_seconds": 10.0, **more},
        )
        task = asyncio.create_task(serve_worker(config, *posts))
        async with asyncio.timeout(20):
            hello = (await peers.said.get()).hello
        yield Process(peers, task, hello)
        if not task.done():
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait({task})
