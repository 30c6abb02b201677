"""Compares a group of ranks with one process that has as many threads, and sums in shared memory with Gloo.

    python -m loadtest.engine.groups --rounds 5
    python -m loadtest.engine.groups --sums-only

Both engines of a round run one after the other, so that the machine's hour counts for both. On one socket a group
cannot be faster: the ratio is what frames and sums cost.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from loadtest.engine.cpu_peers import Engine, step_of
from loadtest.engine.cpu_task import add_arguments, to_task
from loadtest.models import make_model
from loadtest.report import machine, table
from weft.kv.memfd import create_shared_memory, map_file
from weft_kernels.collectives.shared import SharedComm, shared_bytes

MAX_RATIO = 1.10
SUM_KIB = (4, 16, 32, 64, 256)
NUM_SUMS = 400
MAX_SUM_16_KIB_US = 15.0


@dataclass(frozen=True, slots=True)
class Latency:
    """Median and tenth percentile in microseconds; the latter is that of an idle machine."""

    median: float
    idle: float


def latency_of(run: Callable[[], object]) -> Latency:
    times = []
    for _ in range(NUM_SUMS):
        start = time.perf_counter()
        run()
        times.append(1e6 * (time.perf_counter() - start))
    return Latency(statistics.median(times), statistics.quantiles(times, n=10)[0])


def _sum_rank(rank: int, size: int, fd: int, port: int, results: Any) -> None:
    torch.set_num_threads(1)
    comm = SharedComm(rank, size, map_file(fd, shared_bytes(size), is_writable=True))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", rank=rank, world_size=size)
    found = []
    for kib in SUM_KIB:
        x = torch.ones(kib * 256)
        found.append((kib, latency_of(partial(comm.sum, x)), latency_of(partial(dist.all_reduce, x))))
    if rank == 0:
        results.put(found)
    dist.destroy_process_group()


def sums(size: int, port: int) -> list[tuple[int, Latency, Latency]]:
    """Return KiB, and the latency of our sum and of Gloo's, between forked processes."""
    shared = create_shared_memory(shared_bytes(size), "weft-bench-group")
    assert shared is not None
    forks = multiprocessing.get_context("fork")
    results = forks.SimpleQueue()
    ranks = [forks.Process(target=_sum_rank, args=(r, size, os.dup(shared.fd), port, results)) for r in range(size)]
    for each in ranks:
        each.start()
    found: list[tuple[int, Latency, Latency]] = results.get()
    for each in ranks:
        each.join(60)
    return found


def print_sums(size: int, port: int) -> None:
    """Print our sums beside Gloo's."""
    found = sums(size, port)
    cells = [(kib, *(f"{each.median:.1f} ({each.idle:.1f})" for each in both)) for kib, *both in found]
    print(f"sum of {size} ranks, float32, microseconds: median (tenth percentile)")
    print(table(("KiB", "shared memory", "Gloo"), cells))
    idle = next(ours.idle for kib, ours, _ in found if kib == 16)
    if size == 2:
        print(f"16 KiB: {idle:.1f} us, wanted <= {MAX_SUM_16_KIB_US:g}: {verdict(idle <= MAX_SUM_16_KIB_US)}")


def verdict(is_met: bool) -> str:
    return "met" if is_met else "short"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(tempfile.gettempdir()) / "weft-bench-213m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--port", type=int, default=29_511, help="of Gloo's meeting, on loopback")
    parser.add_argument("--sums-only", action="store_true")
    add_arguments(parser)
    options = parser.parse_args()
    task = to_task(options, options.model)
    print(machine())
    if not options.sums_only:
        make_model(options.model)
        alone = Engine("Weft", sys.executable, "loadtest.engine.cpu_ours", options.dtype)
        group = Engine("Weft", sys.executable, "loadtest.engine.cpu_group", options.dtype)
        for _ in range(options.rounds):
            for each in (alone, group):
                each.run(task)
                if each.error:
                    sys.exit(f"{each.module}: {each.error}")
        assert alone.rounds[0]["tokens"][:16] == group.rounds[0]["tokens"][:16] or options.dtype == "bf16"
        rows = []
        for batch in task.batches:
            steps = [each.figures(task)[step_of(batch)] for each in (alone, group)]
            pairs = zip(alone.rounds, group.rounds, strict=True)
            ratio = statistics.median(b["decode_ms"][str(batch)] / a["decode_ms"][str(batch)] for a, b in pairs)
            rows.append((batch, f"{steps[0]:.2f}", f"{steps[1]:.2f}", f"{ratio:.3f}", verdict(ratio <= MAX_RATIO)))
        print(f"ms a step: one process with {task.threads} threads, {task.threads} ranks with one thread each")
        print(table(("batch", "one process", "group", "median ratio", f"wanted <= {MAX_RATIO:g}"), rows))
    print_sums(task.threads, options.port)


if __name__ == "__main__":
    main()
