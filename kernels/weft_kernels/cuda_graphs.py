"""Captures launches as CUDA graphs, replays them, and times calls as a captured graph runs them."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

logger = logging.getLogger(__name__)


class GraphRecorder:
    """Captures what is launched as a graph, to be launched again at once. On a CPU it is done again, step by step.

    So it is, from then on, where a capture has failed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._captures = device.type != "cpu"
        self._memory: Any = None  # of all graphs, from the first on

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """A function that does what `run` does, on the same memory; `run` may wait for nothing and ask for no values.

        All graphs share their memory: what one has computed holds until another one runs.
        """
        if not self._captures:
            return run
        run()  # what compiles kernels and makes libraries' workspaces cannot be captured
        try:
            return self._capture(run)
        except RuntimeError as error:
            self._captures = False
            self._end_capture()
            logger.warning("no graph could be captured, steps are launched kernel by kernel from now on: %s", error)
            return run

    def _end_capture(self) -> None:
        """For the allocator, which torch leaves believing in a capture that the driver has given up: it would give back
        nothing that it has cached any more, not even to those who find no memory."""
        if self._memory is None:
            return
        index = self._device.index
        index = torch.cuda.current_device() if index is None else index
        try:
            torch._C._cuda_endAllocateToPool(index, self._memory)
        except RuntimeError:
            return  # torch has ended it
        torch._C._cuda_releasePool(index, self._memory)

    def _capture(self, run: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        self._memory = self._memory or torch.cuda.graph_pool_handle()
        current = torch.cuda.stream(torch.cuda.current_stream(self._device))
        # a capture that fails leaves its own stream the current one; other threads may go on with their own work
        with current, torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            run()
        self._graphs.append(graph)
        return graph.replay


NUM_TIMES, TIME_SECONDS = 7, 4e-3


def seconds_in_graph(calls: Sequence[Callable[[], object]]) -> float:
    """Of one call, on the current GPU. All `calls` go into one graph: where they read different memory, and together
    more than a cache holds, none finds there what it reads. Median of seven times, of as many replays as take 4 ms."""

    def run() -> None:
        for call in calls:
            call()

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    again = GraphRecorder(torch.device("cuda")).capture(run)

    def replay(times: int) -> float:
        begin.record()
        for _ in range(times):
            again()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / times

    times = max(1, round(TIME_SECONDS / min(replay(1), replay(1))))
    return statistics.median(replay(times) for _ in range(NUM_TIMES)) / len(calls)
