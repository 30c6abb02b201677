"""The scheduler as a process: starts without torch, serves, and ends on SIGTERM."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys

from weft.rpc.client import open_channel
from weft_mesh.v1 import scheduler_service_pb2 as pb
from weft_mesh.v1 import scheduler_service_pb2_grpc as pb_grpc


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
