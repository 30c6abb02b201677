"""Captures launches as CUDA graphs, replays them, and times calls as a captured graph runs them."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

logger = logging.getLogger(__name__)


class GraphRecorder:
    """Captures launches as CUDA graphs.

    On a CPU, and after a failed capture, the recorded function simply runs again.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._captures = device.type != "cpu"
        self._memory: Any = None  # of all graphs, from the first on

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """Return a function that repeats `run` on the same memory; `run` must not synchronise or read values back.

        All graphs share one memory pool: the results of one graph are valid until another graph runs.
        """
        if not self._captures:
            return run
        run()  # compilation and the workspaces of libraries cannot be captured
        try:
            return self._capture(run)
        except RuntimeError as error:
            self._captures = False
            self._end_capture()
            logger.warning("cuda graph capture failed, launching kernel by kernel from now on error=%s", error)
            return run

    def _end_capture(self) -> None:
        """End the failed capture in torch's allocator.

        The driver has given the capture up, but torch believes that it continues and would never release cached memory.
        """
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
        # A failed capture leaves its own stream current. Other threads may continue to launch.
        with current, torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            run()
        self._graphs.append(graph)
        return graph.replay


NUM_TIMES, TIME_SECONDS = 7, 4e-3


def seconds_in_graph(calls: Sequence[Callable[[], object]]) -> float:
    """Return the seconds of one call on the current GPU, as a captured graph runs it.

    All `calls` go into one graph. If together they read more memory than a cache holds, none finds its data cached.
    The result is the median of seven measurements of about 4 ms each.
    """

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
