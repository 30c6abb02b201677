"""What calls take as a captured graph replays them: how a step of decoding runs, with no host in between."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

from weft_kernels.recorder import Recorder

NUM_TIMES, TIME_SECONDS = 7, 4e-3


def replayed_seconds(calls: Sequence[Callable[[], object]]) -> float:
    """Of one call, on the current GPU. All `calls` go into one graph: where they read different memory, and together
    more than a cache holds, none finds there what it reads. Median of seven times, of as many replays as take 4 ms."""

    def run() -> None:
        for call in calls:
            call()

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    again = Recorder(torch.device("cuda")).record(run)

    def replay(times: int) -> float:
        begin.record()
        for _ in range(times):
            again()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / times

    times = max(1, round(TIME_SECONDS / min(replay(1), replay(1))))
    return statistics.median(replay(times) for _ in range(NUM_TIMES)) / len(calls)
