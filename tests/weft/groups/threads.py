"""A group whose ranks are threads of this process: the same sums in the same order, without any transport."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from weft.kv.memfd import create_shared_memory, map_file
from weft_kernels.collectives import join_columns, sum_in_order
from weft_kernels.collectives.shared import SharedComm, shared_bytes

DEADLINE_SECONDS = 60.0
T = TypeVar("T")


@dataclass
class Meeting:
    """Where the ranks meet; `calls` are the kinds and shapes of all collectives so far, as rank 0 made them."""

    size: int
    calls: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    parts: list[Tensor | None] = field(default_factory=list)
    barrier: threading.Barrier = field(init=False)

    def __post_init__(self) -> None:
        self.parts = [None] * self.size
        self.barrier = threading.Barrier(self.size)

    def exchange(self, rank: int, kind: str, part: Tensor) -> list[Tensor]:
        """Return the parts of all ranks."""
        if rank == 0:
            self.calls.append((kind, tuple(part.shape)))
        self.parts[rank] = part
        self.barrier.wait(DEADLINE_SECONDS)
        found = [each for each in self.parts if each is not None]
        self.barrier.wait(DEADLINE_SECONDS)
        return found


@dataclass
class ThreadComm:
    """See `weft_kernels.collectives.Comm`."""

    meeting: Meeting
    rank: int
    native = None

    @property
    def size(self) -> int:
        return self.meeting.size

    def sum(self, x: Tensor) -> Tensor:
        return sum_in_order(self.meeting.exchange(self.rank, "sum", x))

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        assert x.shape[1] == widths[self.rank]
        parts = self.meeting.exchange(self.rank, "gather", x)
        return join_columns(parts) if self.rank == 0 else x

    def check(self) -> None:
        """Ranks that fail break the barrier."""


def shared_comms(size: int) -> list[SharedComm]:
    """Return a rank for each mapping of one shared memory, as processes of a group have them."""
    shared = create_shared_memory(shared_bytes(size), "weft-test-group")
    assert shared is not None
    addresses = [map_file(os.dup(shared.fd), shared_bytes(size), is_writable=True) for _ in range(size)]
    return [SharedComm(rank, size, address) for rank, address in enumerate(addresses)]


def on_all_ranks(size: int, work: Callable[[ThreadComm], T]) -> tuple[list[T], Meeting]:
    """Run `work` on every rank, and return the results by rank. A rank that fails ends the others' waiting."""
    meeting = Meeting(size)

    def guarded(rank: int) -> T:
        try:
            return work(ThreadComm(meeting, rank))
        except BaseException:
            meeting.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        found = [pool.submit(guarded, rank) for rank in range(size)]
    errors = [each.exception() for each in found if each.exception() is not None]
    causes = [each for each in errors if not isinstance(each, threading.BrokenBarrierError)]
    if errors:
        raise (causes or errors)[0] or AssertionError
    return [each.result() for each in found], meeting
