"""A `weft up` of one's own, and what can be done to its workers: SIGKILL, or SIGSTOP until they are healed."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
import httpx
import psutil

from weft.cli.child import die_with
from weft.cli.ports import free_ports
from weft_mesh.v1 import scheduler_service_pb2, scheduler_service_pb2_grpc

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 180.0
MAX_REPORT_AGE_MS = 2500
QUIET_SECONDS, QUIET_CHECKS = 90.0, 180
# a fault: what is done to a worker of that role, chosen by chance
FAULTS = {
    "kill-decode": (signal.SIGKILL, "decode"),
    "freeze-decode": (signal.SIGSTOP, "decode"),
    "kill-prefill": (signal.SIGKILL, "prefill"),
    "freeze-prefill": (signal.SIGSTOP, "prefill"),
}


class MeshTrouble(Exception):
    """The mesh does not do what can be expected of it; the message says what."""


class LocalMesh:
    """Two prefill and two decode workers unless told otherwise, on free ports, while the block lasts."""

    def __init__(
        self,
        model: str = "",
        num_prefill: int = 2,
        num_decode: int = 2,
        environment: dict[str, str] | None = None,
        num_both: int = 0,
    ) -> None:
        port, grpc_port = free_ports(2)
        self.url = f"http://127.0.0.1:{port}"
        self._num_workers = num_prefill + num_decode + num_both
        self._hit: list[psutil.Process] = []
        self._gone: set[str] = set()  # boot ids of the killed
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (lives as long as the mesh)
        command = [sys.executable, "-m", "weft.cli.main", "up", "--port", str(port), "--grpc-port", str(grpc_port)]
        command += ["--model", model or str(ROOT / "models" / "weft-nano"), "--dtype", "float32", "--threads", "1"]
        command += ["--prefill", str(num_prefill), "--decode", str(num_decode), "--both", str(num_both)]
        parent = os.getpid()
        self._up = psutil.Popen(
            command,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
            # a benchmark that is killed takes its mesh along
            preexec_fn=lambda: die_with(parent, signal.SIGINT),
        )

    def __enter__(self) -> Self:
        deadline = time.monotonic() + START_SECONDS
        while not self._is_ready():
            # asked of itself: to psutil a process runs for as long as nobody has heard of its end
            if time.monotonic() > deadline or self._up.poll() is not None:
                trouble = MeshTrouble(f"the mesh does not start:\n{self.log()[-4000:]}")
                self.__exit__(None, None, None)
                raise trouble
            time.sleep(0.2)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._hit:
            _signal(process, signal.SIGCONT)
        _signal(self._up, signal.SIGINT)
        try:
            self._up.wait(20)
        except psutil.TimeoutExpired:
            self._up.kill()
        self._log.close()

    def log(self) -> str:
        """All that was written so far. The children's place in it stays where it is."""
        file = self._log.fileno()
        return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")

    def child(self, name: str) -> psutil.Process:
        """The process of a service or worker. Raises LookupError while there is none."""
        for process in self._up.children(recursive=True):
            try:
                if process.name() == name:
                    return process
            except psutil.Error:  # it ends just now
                continue
        raise LookupError(f"no process {name}")

    def metrics_url(self, name: str) -> str:
        """Where a service other than the gateway tells its metrics: it listens there and on its port for calls."""
        process = self.child(name)
        ports = {each.laddr.port for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN}
        (port,) = ports - {int(process.environ()["WEFT_PORT"])}
        return f"http://127.0.0.1:{port}/metrics"

    def hit(self, fault: str, dice: random.Random) -> str:
        """Do it to one of the role's two workers; returns its name."""
        number, role = FAULTS[fault]
        name = f"{role}-{dice.randrange(2)}"
        process = self.child(name)
        self._hit.append(process)
        if number == signal.SIGKILL:
            self._gone |= {worker.boot_id for worker in self.addresses() if worker.worker_id == name}
        process.send_signal(number)
        return name

    async def heal(self) -> None:
        """Wake who was frozen, and wait until every worker has joined again and is ready."""
        for process in self._hit:
            _signal(process, signal.SIGCONT)
        self._hit.clear()
        deadline = time.monotonic() + START_SECONDS
        while not await asyncio.to_thread(self._is_whole):
            if time.monotonic() > deadline:
                raise MeshTrouble(f"a worker does not come back:\n{self.log()[-4000:]}")
            await asyncio.sleep(0.3)

    async def until_whole(self) -> None:
        """Wait until the gateway answers and every worker is ready again."""
        deadline = time.monotonic() + START_SECONDS
        while not await asyncio.to_thread(self._is_ready):
            if time.monotonic() > deadline:
                raise MeshTrouble(f"the mesh does not come back:\n{self.log()[-4000:]}")
            await asyncio.sleep(0.3)

    async def moves(self, client: httpx.AsyncClient) -> int:
        """Sequences that the gateway has moved so far."""
        text = (await client.get("/metrics")).text
        return round(
            sum(float(value) for value in re.findall(r"^weft_sequence_migrations_total\{.*\} (\S+)$", text, re.M))
        )

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=5).status_code == httpx.codes.OK and self._is_whole()
        except (httpx.TransportError, grpc.RpcError, LookupError):
            return False

    def processes(self) -> dict[str, psutil.Process]:
        """Every process of the mesh by service or worker, `weft up` itself included."""
        named: dict[str, psutil.Process] = {"up": self._up}
        for process in self._up.children(recursive=True):
            try:
                name, owner = process.name(), process.parent()
                if name.startswith("python") and owner is not None:
                    # Mooncake's clients are Pythons of their own, beside the process that they work for
                    name = "fork_server" if owner.pid == self._up.pid else f"{owner.name()} store"
                named[name] = process
            except psutil.Error:  # it ends just now
                continue
        return named

    def missing_blocks(self) -> dict[str, int]:
        """Blocks that are neither free nor cached, by worker; empty when the mesh is idle and nothing is lost."""
        fleet = self._fleet()
        missing = {
            w.hello.worker.worker_id: w.hello.num_blocks - w.report.free_blocks - w.report.cached_blocks for w in fleet
        }
        return {name: count for name, count in missing.items() if count}

    async def until_quiet(self) -> dict[str, int]:
        """Wait until nothing runs; returns the blocks that are missing then, by worker, which should be none."""
        missing: dict[str, int] = {}
        for _ in range(QUIET_CHECKS):
            if not (missing := await asyncio.to_thread(self.missing_blocks)):
                break
            await asyncio.sleep(QUIET_SECONDS / QUIET_CHECKS)
        return missing

    def _is_whole(self) -> bool:
        """As the scheduler sees it: every worker is there, ready, has just said so, and is none of the killed."""
        able = [w for w in self._fleet() if w.report.ready and w.report_age_ms < MAX_REPORT_AGE_MS]
        return len([w for w in able if w.hello.worker.boot_id not in self._gone]) == self._num_workers

    def addresses(self) -> list[scheduler_service_pb2.WorkerAddress]:
        """Of all live workers."""
        return [worker.hello.worker for worker in self._fleet()]

    def reports(self) -> dict[str, scheduler_service_pb2.WorkerReport]:
        """What every live worker said last, by name."""
        return {worker.hello.worker.worker_id: worker.report for worker in self._fleet()}

    def pool_tokens(self) -> int:
        """Of the smallest pool."""
        return min(worker.hello.num_blocks * worker.hello.fingerprint.block_tokens for worker in self._fleet())

    def _fleet(self) -> list[scheduler_service_pb2.WorkerStatus]:
        with grpc.insecure_channel(self.child("gateway").environ()["WEFT_SCHEDULER_ADDR"]) as channel:
            stub = scheduler_service_pb2_grpc.FleetServiceStub(channel)  # type: ignore[no-untyped-call, unused-ignore]
            return list(stub.ListWorkers(scheduler_service_pb2.ListWorkersRequest(), timeout=10).workers)


def _signal(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return
