"""A `weft up` of a benchmark's own, and the faults it takes: SIGKILL, or SIGSTOP until it is healed."""

from __future__ import annotations

import asyncio
import random
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import httpx
import psutil

from loadtest.processes import ROOT, START_SECONDS, BenchError, Processes, send_signal
from weft.cli.layout import free_ports
from weft_mesh.v1 import scheduler_service_pb2, scheduler_service_pb2_grpc

MAX_REPORT_AGE_MS = 2500
QUIET_SECONDS, QUIET_CHECKS = 90.0, 180
# a fault: the signal, and the role of the worker that gets it
FAULTS = {
    "kill-decode": (signal.SIGKILL, "decode"),
    "freeze-decode": (signal.SIGSTOP, "decode"),
    "kill-prefill": (signal.SIGKILL, "prefill"),
    "freeze-prefill": (signal.SIGSTOP, "prefill"),
}


class LocalMesh(Processes):
    """A mesh on free ports that is ready inside the block; two prefill and two decode workers by default."""

    def __init__(
        self,
        model: str = "",
        num_prefill: int = 2,
        num_decode: int = 2,
        environment: Mapping[str, str] | None = None,
        num_both: int = 0,
        log_path: Path | None = None,
        options: Sequence[str] = (),
    ) -> None:
        """`options`: further ones of `weft up`; they take precedence."""
        super().__init__(log_path)
        port, grpc_port = free_ports(2)
        self.url = f"http://127.0.0.1:{port}"
        self._num_workers = num_prefill + num_decode + num_both
        self._hit: list[psutil.Process] = []
        self._gone: set[str] = set()  # boot ids of killed workers
        command = [sys.executable, "-m", "weft.cli.main", "up", "--port", str(port), "--grpc-port", str(grpc_port)]
        command += ["--model", model or str(ROOT / "models" / "weft-nano"), "--dtype", "float32", "--threads", "1"]
        command += ["--prefill", str(num_prefill), "--decode", str(num_decode), "--both", str(num_both)]
        self._up = self.start([*command, *options], environment)

    def __enter__(self) -> Self:
        try:
            self.wait("the mesh", self._is_ready)
        except BenchError:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._wake()
        super().__exit__(kind, error, trace)

    def processes(self) -> dict[str, psutil.Process]:
        """Return every process by service or worker; `weft up` itself is "up"."""
        named: dict[str, psutil.Process] = {"up": self._up}
        for process in self._up.children(recursive=True):
            try:
                name, owner = process.name(), process.parent()
                if name.startswith("python") and owner is not None:
                    # Mooncake's clients are Python processes beside the one they work for
                    name = "fork_server" if owner.pid == self._up.pid else f"{owner.name()} store"
                named[name] = process
            except psutil.Error:  # it ends just now
                continue
        return named

    def child(self, name: str) -> psutil.Process:
        """Return the process of a service or worker. Raises LookupError while there is none."""
        return self.processes()[name]

    def metrics_url(self, name: str) -> str:
        """Return the metrics URL of a service other than the gateway: it listens there and on its gRPC port."""
        process = self.child(name)
        ports = {each.laddr.port for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN}
        (port,) = ports - {int(process.environ()["WEFT_PORT"])}
        return f"http://127.0.0.1:{port}/metrics"

    def hit(self, fault: str, dice: random.Random) -> str:
        """Do a fault to one of the role's two workers; return its name."""
        number, role = FAULTS[fault]
        name = f"{role}-{dice.randrange(2)}"
        process = self.child(name)
        self._hit.append(process)
        if number == signal.SIGKILL:
            self._gone |= {worker.boot_id for worker in self.addresses() if worker.worker_id == name}
        process.send_signal(number)
        return name

    async def heal(self) -> None:
        """Wake frozen workers, and wait until every worker has joined again and is ready. Raises BenchError."""
        self._wake()
        deadline = time.monotonic() + START_SECONDS
        while not await asyncio.to_thread(self._is_ready):
            if time.monotonic() > deadline:
                raise BenchError(f"the mesh does not come back:\n{self.log()[-4000:]}")
            await asyncio.sleep(0.3)

    async def moves(self, client: httpx.AsyncClient) -> int:
        """Return how many sequences the gateway has migrated so far."""
        text = (await client.get("/metrics")).text
        return round(sum(map(float, re.findall(r"^weft_sequence_migrations_total\{.*\} (\S+)$", text, re.M))))

    async def until_quiet(self) -> dict[str, int]:
        """Wait until nothing runs; return the blocks that are then missing, by worker, which should be none."""
        missing: dict[str, int] = {}
        for _ in range(QUIET_CHECKS):
            if not (missing := await asyncio.to_thread(self.missing_blocks)):
                break
            await asyncio.sleep(QUIET_SECONDS / QUIET_CHECKS)
        return missing

    def missing_blocks(self) -> dict[str, int]:
        """Return the blocks that are neither free nor cached, by worker; none when the mesh is idle and lost none."""
        missing = {
            w.hello.worker.worker_id: w.hello.num_blocks - w.report.free_blocks - w.report.cached_blocks
            for w in self._fleet()
        }
        return {name: count for name, count in missing.items() if count}

    def addresses(self) -> list[scheduler_service_pb2.WorkerAddress]:
        """Return the addresses of all live workers."""
        return [worker.hello.worker for worker in self._fleet()]

    def reports(self) -> dict[str, scheduler_service_pb2.WorkerReport]:
        """Return the last report of every live worker by name."""
        return {worker.hello.worker.worker_id: worker.report for worker in self._fleet()}

    def drain(self, worker_id: str) -> None:
        """Let a worker take no more requests."""
        with self._scheduler() as stub:
            stub.Drain(scheduler_service_pb2.DrainRequest(worker_id=worker_id), timeout=10)

    def pool_tokens(self) -> int:
        """Return the size of the smallest pool."""
        return min(worker.hello.num_blocks * worker.hello.fingerprint.block_tokens for worker in self._fleet())

    def _wake(self) -> None:
        for process in self._hit:
            send_signal(process, signal.SIGCONT)
        self._hit.clear()

    def _is_ready(self) -> bool:
        """The gateway is ready, and the scheduler has fresh reports of every worker, none of them a killed one."""
        try:
            if httpx.get(f"{self.url}/ready", timeout=5).status_code != httpx.codes.OK:
                return False
            able = [w for w in self._fleet() if w.report.ready and w.report_age_ms < MAX_REPORT_AGE_MS]
        except (httpx.TransportError, grpc.RpcError, LookupError, psutil.Error):
            return False
        return len([w for w in able if w.hello.worker.boot_id not in self._gone]) == self._num_workers

    def _fleet(self) -> list[scheduler_service_pb2.WorkerStatus]:
        with self._scheduler() as stub:
            return list(stub.ListWorkers(scheduler_service_pb2.ListWorkersRequest(), timeout=10).workers)

    @contextmanager
    def _scheduler(self) -> Iterator[Any]:
        with grpc.insecure_channel(self.child("gateway").environ()["WEFT_SCHEDULER_ADDR"]) as channel:
            yield scheduler_service_pb2_grpc.FleetServiceStub(channel)  # type: ignore[no-untyped-call, unused-ignore]
