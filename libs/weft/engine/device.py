"""Between host and device without waiting: what is copied is kept until the copy is done. Knows no batches."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft_kernels.upload import upload

logger = logging.getLogger(__name__)
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in the device's work; on a CPU everything before it has happened."""

    event: torch.cuda.Event | None

    def wait(self) -> None:
        """Until the device has come so far; the thread sleeps meanwhile."""
        if self.event is not None:
            self.event.synchronize()


@dataclass(frozen=True, slots=True)
class Link:
    """To one device. Copies take their turn in its work."""

    device: torch.device

    @property
    def is_direct(self) -> bool:
        """The device computes in the host's memory."""
        return self.device.type == "cpu"

    def upload(self, array: Array) -> Tensor:
        """Onto the device; the array may change afterwards."""
        return upload(torch.from_numpy(np.ascontiguousarray(array)), self.device)

    def download(self, tensor: Tensor) -> Tensor:
        """To be read on the host after a later `mark`."""
        if self.is_direct:
            return tensor
        return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)

    def mark(self) -> Mark:
        """Behind all that was launched so far."""
        if self.is_direct:
            return Mark(None)
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return Mark(event)


class Recorder:
    """Captures what is launched as a graph, to be launched again at once. On a CPU it is done again, step by step.

    So it is, from then on, where a capture has failed.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._captures = not link.is_direct
        self._memory: Any = None  # of all graphs, from the first on

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
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
        index = self._link.device.index
        index = torch.cuda.current_device() if index is None else index
        try:
            torch._C._cuda_endAllocateToPool(index, self._memory)
        except RuntimeError:
            return  # torch has ended it
        torch._C._cuda_releasePool(index, self._memory)

    def _capture(self, run: Callable[[], None]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        self._memory = self._memory or torch.cuda.graph_pool_handle()
        current = torch.cuda.stream(torch.cuda.current_stream(self._link.device))
        # a capture that fails leaves its own stream the current one; other threads may go on with their own work
        with current, torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            run()
        self._graphs.append(graph)
        return graph.replay
