"""How long a killed worker is away, and what its successor reads from disk; the weights are in shared memory all along.

`python -m loadtest.weights.restart [--model DIR] [--rounds 3] [--json FILE]` starts a mesh of its own with `weft up`,
kills its decode worker again and again, and asks until the new one is ready: one that has lived for a while, and its
successor as soon as that is ready, which waits for the supervisor's backoff.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from weft.cli.health import grpc_serves
from weft.cli.ports import free_ports
from weft.cli.record import MeshRecord, running_meshes
from weft.cli.supervisor import RestartPolicy

MODEL = Path("models/weft-nano")
WORKER = "decode-0"
START_SECONDS = 180.0
PROBE_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Restart:
    """From the kill to SERVING, and the bytes that storage gave the new process until then."""

    is_second: bool
    seconds: float
    disk_bytes: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    restarts = []
    with mesh(options.model) as (pid, record):
        for _ in range(options.rounds):
            time.sleep(RestartPolicy().healthy_if_forked + 1)
            restarts.append(restart(pid, record, is_second=False))
            restarts.append(restart(pid, record, is_second=True))
            print(restarts[-2:], flush=True)
    print(report(restarts))
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in restarts], indent=2) + "\n")


@contextmanager
def mesh(model: Path) -> Iterator[tuple[int, MeshRecord]]:
    """A mesh that is ready, and its process."""
    http, grpc = free_ports(2)
    program = "from weft.cli.main import main; main()"
    command = [
        sys.executable,
        "-c",
        program,
        "up",
        "--model",
        str(model),
        "--port",
        str(http),
        "--grpc-port",
        str(grpc),
    ]
    with tempfile.TemporaryFile() as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            record = asyncio.run(until_ready(process, http))
            yield process.pid, record
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


async def until_ready(process: subprocess.Popen[bytes], port: int) -> MeshRecord:
    """Raises TimeoutError."""
    async with asyncio.timeout(START_SECONDS):
        while process.poll() is None:
            for record in running_meshes():
                if record.pid == process.pid and await grpc_serves(record.services["gateway"]):
                    return record
            await asyncio.sleep(0.5)
    raise SystemExit("the mesh did not start")


def restart(mesh_pid: int, record: MeshRecord, is_second: bool) -> Restart:
    """Kill the worker and wait for the next one."""
    old = worker_pid(mesh_pid, record.services[WORKER])
    began = time.perf_counter()
    os.kill(old, signal.SIGKILL)
    asyncio.run(until_serving(record.services[WORKER]))
    seconds = time.perf_counter() - began
    counters = Path(f"/proc/{worker_pid(mesh_pid, record.services[WORKER])}/io").read_text().splitlines()
    disk = next(int(line.split()[1]) for line in counters if line.startswith("read_bytes:"))
    return Restart(is_second, seconds, disk)


async def until_serving(address: str) -> None:
    """After it was seen not to. Raises TimeoutError."""
    async with asyncio.timeout(START_SECONDS):
        for wanted in (False, True):
            while True:
                if await grpc_serves(address) is wanted:
                    break
                await asyncio.sleep(PROBE_SECONDS)


def worker_pid(mesh_pid: int, address: str) -> int:
    """Of the process that listens there; the mesh's standby process has forked it."""
    port = int(address.rpartition(":")[2])
    for child in psutil.Process(mesh_pid).children(recursive=True):
        found = child.net_connections("tcp") if child.status() != psutil.STATUS_ZOMBIE else []
        if any(each.laddr.port == port and each.status == psutil.CONN_LISTEN for each in found):
            return child.pid
    raise SystemExit(f"nobody listens at {address}")


def report(restarts: list[Restart]) -> str:
    """A table."""
    lines = ["| | kill to serving, s | disk bytes read |", "|---|---|---|"]
    for is_second, kind in ((False, "killed after a while"), (True, "killed again at once")):
        of = [each for each in restarts if each.is_second == is_second]
        times = ", ".join(f"{each.seconds:.2f}" for each in of)
        lines.append(f"| {kind} | {times} | {', '.join(str(each.disk_bytes) for each in of)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
