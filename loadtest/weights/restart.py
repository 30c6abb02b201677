"""Downtime of a worker that was killed, or slept and was woken, and the bytes read from disk until it serves again.

    python -m loadtest.weights.restart [--model DIR] [--rounds 3] [--idle 11] [--json FILE] [--timeline FILE.svg]

The weights stay in shared memory. Starts a mesh with `weft up`, kills its decode worker after `--idle` seconds, and its
successor as soon as that is ready, which waits for the supervisor's backoff. Then the worker sleeps and wakes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from loadtest.processes import START_SECONDS, Processes
from loadtest.report import table
from weft.cli import fleet_commands
from weft.cli.child import RestartPolicy
from weft.cli.health import grpc_serves
from weft.cli.layout import free_ports
from weft.cli.mesh_registry import MeshRecord, running_meshes
from weft.rpc.client import open_channel
from weft_mesh.v1 import scheduler_service_pb2, scheduler_service_pb2_grpc

MODEL = Path("models/weft-nano")
WORKER = "decode-0"
PROBE_SECONDS = 0.02
KILLED, AGAIN, WOKEN = "killed after a while", "killed again at once", "asleep, and woken"


@dataclass(frozen=True, slots=True)
class Restart:
    """Seconds from the kill or wake to SERVING, and the bytes that the process and its store process read."""

    what: str
    seconds: float
    disk_bytes: int
    started_bytes: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--idle", type=float, default=RestartPolicy().healthy_if_forked + 1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--timeline", type=Path, help="a picture of all these starts, by `weft up`")
    options = parser.parse_args()
    restarts = []
    with mesh(options.model, options.timeline) as (pid, record):
        for _ in range(options.rounds):
            time.sleep(options.idle)
            restarts.append(restart(pid, record, KILLED))
            restarts.append(restart(pid, record, AGAIN))
            restarts.append(wake(pid, record))
            print(restarts[-3:], flush=True)
    print(report(restarts))
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in restarts], indent=2) + "\n")


@contextmanager
def mesh(model: Path, timeline: Path | None) -> Iterator[tuple[int, MeshRecord]]:
    """Yield the process id and the record of a mesh that is ready."""
    http, grpc = free_ports(2)
    command = [sys.executable, "-m", "weft.cli.main", "up", "--model", str(model)]
    command += ["--port", str(http), "--grpc-port", str(grpc), *(["--timeline", str(timeline)] if timeline else [])]
    with Processes() as processes:
        process = processes.start(command)
        records: list[MeshRecord] = []

        def is_ready() -> bool:
            records[:] = [record for record in running_meshes() if record.pid == process.pid]
            return bool(records) and asyncio.run(grpc_serves(records[0].services["gateway"]))

        processes.wait("the mesh", is_ready)
        yield process.pid, records[0]


def restart(mesh_pid: int, record: MeshRecord, what: str) -> Restart:
    """Kill the worker and wait for its successor."""
    old = worker_pid(mesh_pid, record.services[WORKER])
    began = time.perf_counter()
    os.kill(old, signal.SIGKILL)
    asyncio.run(until_serving(record.services[WORKER], False, True))
    seconds = time.perf_counter() - began
    return Restart(what, seconds, *disk_bytes(worker_pid(mesh_pid, record.services[WORKER])))


def wake(mesh_pid: int, record: MeshRecord) -> Restart:
    """Put the worker to sleep, and wake it when it has released its memory."""
    scheduler, process = record.services["scheduler"], worker_pid(mesh_pid, record.services[WORKER])
    fleet_commands.sleep(scheduler, WORKER, even_last=True)
    asyncio.run(until_asleep(scheduler))
    before, began = disk_bytes(process), time.perf_counter()
    fleet_commands.wake(scheduler, WORKER)
    asyncio.run(until_serving(record.services[WORKER], True))
    seconds = time.perf_counter() - began
    own, started = (after - then for after, then in zip(disk_bytes(process), before, strict=True))
    return Restart(WOKEN, seconds, own, started)


async def until_asleep(scheduler: str) -> None:
    """Wait until the worker has released its memory and joined again. Raises TimeoutError."""
    async with asyncio.timeout(START_SECONDS), open_channel(scheduler) as channel:
        fleet = scheduler_service_pb2_grpc.FleetServiceStub(channel)
        while True:
            fleet_status = await fleet.ListWorkers(scheduler_service_pb2.ListWorkersRequest())
            # before it sleeps it still has blocks to report
            if any(each.hello.worker.worker_id == WORKER and _sleeps(each.report) for each in fleet_status.workers):
                break
            await asyncio.sleep(PROBE_SECONDS)


def _sleeps(report: scheduler_service_pb2.WorkerReport) -> bool:
    return report.asleep and not report.free_blocks + report.cached_blocks


def disk_bytes(process: int) -> tuple[int, int]:
    """Return the bytes read from disk so far by a process with its ended children, and by its living children."""

    def read_by(each: psutil.Process) -> int:
        counters = Path(f"/proc/{each.pid}/io").read_text().splitlines()
        return next(int(line.split()[1]) for line in counters if line.startswith("read_bytes:"))

    own = psutil.Process(process)
    return read_by(own), sum(map(read_by, own.children(recursive=True)))


async def until_serving(address: str, *wanted: bool) -> None:
    """Wait for each state in turn: serving or not. Raises TimeoutError."""
    async with asyncio.timeout(START_SECONDS):
        for each in wanted:
            while True:
                if await grpc_serves(address) is each:
                    break
                await asyncio.sleep(PROBE_SECONDS)


def worker_pid(mesh_pid: int, address: str) -> int:
    """Return the process that listens at an address; the mesh's standby process has forked it."""
    port = int(address.rpartition(":")[2])
    for child in psutil.Process(mesh_pid).children(recursive=True):
        found = child.net_connections("tcp") if child.status() != psutil.STATUS_ZOMBIE else []
        if any(each.laddr.port == port and each.status == psutil.CONN_LISTEN for each in found):
            return child.pid
    raise SystemExit(f"no process listens at {address}")


def report(restarts: list[Restart]) -> str:
    rows = []
    for kind in (KILLED, AGAIN, WOKEN):
        of = [each for each in restarts if each.what == kind]
        times = ", ".join(f"{each.seconds:.2f}" for each in of)
        own = ", ".join(str(each.disk_bytes) for each in of)
        rows.append((kind, times, own, ", ".join(str(each.started_bytes) for each in of)))
    return table(("", "until it serves again, s", "disk bytes read", "by its store's process"), rows)


if __name__ == "__main__":
    main()
