"""A mesh that runs on this machine, asked: which way its KV blocks go, by its own count."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterator, Sequence

import grpc
import httpx

from weft.cli.doctor.finding import Finding, Level, Subject
from weft.cli.record import MeshRecord, running_meshes
from weft.cli.status import explain
from weft.config import ConfigError
from weft.rpc.client import open_channel
from weft_mesh.v1 import scheduler_service_pb2 as pb
from weft_mesh.v1 import scheduler_service_pb2_grpc as pb_grpc

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
            yield Finding("mesh", Level.WARNING, says, advice)


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
        return Finding("mesh", Level.WARNING, says, "give all workers the same WEFT_TRANSPORT")
    if pulled[FALLBACK] and meant != [FALLBACK]:
        return Finding("mesh", Level.WARNING, says, "gRPC is the slow way: the workers' logs say why it was taken")
    return Finding("mesh", Level.OK, says)


async def _workers(scheduler: str) -> Sequence[pb.WorkerStatus]:
    async with open_channel(scheduler) as channel:
        reply = await pb_grpc.FleetServiceStub(channel).ListWorkers(pb.ListWorkersRequest(), timeout=ASK_SECONDS)
    return reply.workers
