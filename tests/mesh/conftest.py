"""A whole mesh as real processes: `weft up` on a free port, looked at from outside like an operator would."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

import grpc
import httpx
import psutil
import pytest

from weft.cli.layout import free_ports
from weft_mesh.v1 import scheduler_service_pb2, scheduler_service_pb2_grpc

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "weft-nano"
START_SECONDS = 120.0


def wait_until(what: str, condition: Callable[[], bool], seconds: float = 90.0) -> None:
    """Poll until true; fails with `what` after the deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {seconds} s still not: {what}")
        time.sleep(0.05)


def free_port() -> int:
    """A loopback port that was free a moment ago, and that no connection is given meanwhile."""
    return free_ports(1)[0]


def is_alive(process: psutil.Process) -> bool:
    """Running, and not just waiting to be collected."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class Mesh:
    """A running `weft up` and the handles to look inside and to break things."""

    def __init__(
        self, *options: str, environment: dict[str, str] | None = None, models: Sequence[str | Path] = (MODEL,)
    ) -> None:
        self.port, self.grpc_port = free_ports(2)
        self.url = f"http://127.0.0.1:{self.port}"
        self._log: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 (lives as long as the mesh)
        command = [sys.executable, "-m", "weft.cli.main", "up", "--port", str(self.port)]
        command += [part for model in models for part in ("--model", str(model))]
        command += ["--grpc-port", str(self.grpc_port), "--dtype", "float32", "--threads", "1", *options]
        self.process = psutil.Popen(
            command,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        self.client = httpx.Client(base_url=self.url, timeout=60.0)
        self._scheduler = ""

    def wait_ready(self) -> None:
        """Until /ready answers 200."""
        try:
            wait_until("the mesh is ready", self.is_ready, START_SECONDS)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.log()}") from None

    def is_ready(self) -> bool:
        """Does /ready answer 200 now."""
        if not is_alive(self.process):
            raise RuntimeError(f"weft up has ended:\n{self.log()}")
        try:
            return self.client.get("/ready").status_code == 200
        except httpx.TransportError:
            return False

    def log(self) -> str:
        """The merged log so far. The children's place in it stays where it is."""
        file = self._log.fileno()
        return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")

    def child(self, *names: str) -> psutil.Process:
        """The process of a service ("kvstore") or a worker ("prefill-0"); the first of several names."""
        for process in self.process.children(recursive=True):
            try:
                if process.name() in names:
                    return process
            except psutil.Error:
                continue
        raise LookupError(f"no process {' or '.join(names)}")

    def valkey(self) -> psutil.Process:
        """The Valkey server's process."""
        return next(p for p in self.process.children(recursive=True) if "valkey-server" in " ".join(p.cmdline()))

    def workers(self) -> dict[str, scheduler_service_pb2.WorkerStatus]:
        """The scheduler's view of the fleet."""
        # it stays where it is; looking it up takes longer than many a state lasts that a test waits for
        self._scheduler = self._scheduler or self.child("gateway", "gateway-0").environ()["WEFT_SCHEDULER_ADDR"]
        try:
            reply = self._listed(self._scheduler)
        except grpc.RpcError as error:  # a connection that hangs says nothing of the scheduler: another one is opened
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
            reply = self._listed(self._scheduler)
        return {status.hello.worker.worker_id: status for status in reply.workers}

    def _listed(self, scheduler: str) -> scheduler_service_pb2.ListWorkersResponse:
        with grpc.insecure_channel(scheduler) as channel:
            stub = scheduler_service_pb2_grpc.FleetServiceStub(channel)
            return stub.ListWorkers(scheduler_service_pb2.ListWorkersRequest(), timeout=5)

    def metric(self, worker: str, name: str, **labels: str) -> float:
        """The sum of a worker's samples of that name whose labels match."""
        text = httpx.get(f"http://{self.workers()[worker].hello.metrics_address}/metrics", timeout=5).text
        total = 0.0
        for line in text.splitlines():
            found = re.match(rf"{name}(?:\{{(.*)\}})? (\S+)$", line)
            if found and all(f'{key}="{value}"' in (found[1] or "") for key, value in labels.items()):
                total += float(found[2])
        return total

    def boots(self) -> dict[str, str]:
        """The boot id of every live worker."""
        return {name: status.hello.worker.boot_id for name, status in self.workers().items()}

    def kill(self, name: str) -> None:
        """SIGKILL a service or worker."""
        self.child(name).send_signal(signal.SIGKILL)

    def wait_for_return(self, old: dict[str, str], *names: str) -> None:
        """Until each worker is back under another boot id than in `old`, and the gateway knows."""

        def are_back() -> bool:
            now = self.workers()
            return all(
                name in now and now[name].hello.worker.boot_id != old[name] and now[name].report.ready for name in names
            )

        wait_until(f"{names} are back", are_back, START_SECONDS)
        wait_until("the mesh is ready again", self.is_ready)

    def kill_and_wait_for_return(self, *names: str) -> None:
        """SIGKILL workers together, then wait until all are back."""
        old = self.boots()
        for name in names:
            self.kill(name)
        self.wait_for_return(old, *names)

    def wait_idle(self) -> None:
        """Until nothing is booked, running or held anywhere."""

        began = time.monotonic()

        def is_idle() -> bool:
            return all(
                # workers report once a second: what they said before this was asked counts for nothing
                s.report_age_ms < 1000 * (time.monotonic() - began)
                and not (s.booked_requests or s.booked_prefill_tokens or s.booked_decode_tokens)
                and not (s.report.num_running or s.report.num_waiting or s.report.active_tokens)
                and not (s.report.active_blocks or s.report.quarantined_blocks)
                and s.report.free_blocks + s.report.cached_blocks == s.hello.num_blocks
                for s in self.workers().values()
            )

        wait_until("the mesh is idle and no block is lost", is_idle)

    def stop(self) -> None:
        """Ctrl-C, and nothing may be left after the promised time."""
        tree = self.process.children(recursive=True)
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(15)
        except psutil.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            self.client.close()
        _, remaining = psutil.wait_procs(tree, timeout=10)
        # an orphan that has ended is a zombie until the system's first process collects it
        alive = [process for process in remaining if is_alive(process)]
        for process in alive:
            process.kill()
        self._log.close()
        assert not alive, f"left behind: {alive}"


@pytest.fixture(scope="package")
def mesh() -> Iterator[Mesh]:
    """One prefill and one decode worker, chunks of 16 tokens, Mooncake; what the store has is always fetched. Requests
    wait for a worker for as long as they may: a busy machine takes its time to start one anew."""
    settings = {"WEFT_CHUNK_TOKENS": "16", "WEFT_STORE_FETCH_POLICY": "always", "WEFT_MAX_QUEUE_WAIT_SECONDS": "4"}
    running = Mesh("--transport", "mooncake", environment=settings)
    try:
        running.wait_ready()
        yield running
    finally:
        running.stop()
