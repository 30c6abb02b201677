"""What calls take as a captured graph replays them: how a step of decoding runs, with no host in between."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

NUM_TIMES = 7


def replayed_seconds(calls: Sequence[Callable[[], object]], total_seconds: float = 4e-3) -> float:
    """Of one call, on a GPU. All `calls` go into one graph: where they read different memory, and together more than a
    cache holds, none finds there what it reads. Median of seven times, each of as many replays as take `total_seconds`.
    """
    for call in calls:  # compiles, allocates
        call()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    graph = torch.cuda.CUDAGraph()
    # other threads may go on with their own work
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for call in calls:
            call()

    def replay(times: int) -> float:
        begin.record()
        for _ in range(times):
            graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / times

    times = max(1, round(total_seconds / min(replay(1), replay(1))))
    return statistics.median(replay(times) for _ in range(NUM_TIMES)) / len(calls)
