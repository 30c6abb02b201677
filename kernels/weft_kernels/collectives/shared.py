"""Collectives of processes on one machine, in memory that all of them map; the C++ part is shared.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft_kernels.native import LONG, POINTER
from weft_kernels.native import native as native_library

LINE_BYTES, PAGE_BYTES = 64, 4096
# Beyond this, sums and gathers run in pieces. Larger parts leave the second-level cache before they are read.
SLOT_BYTES = 1 << 20
MAX_THREADS = 256
# A rank that is this late is lost. Death is noticed long before, by the connection to the rank.
DEADLINE_SECONDS = 60.0
SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}


class GroupLost(Exception):
    """A rank of the group did not come to a collective in time; the group cannot go on."""


class _Group(ctypes.Structure):
    """Memory layout of `SharedGroup` in shared.h."""

    _fields_ = (
        ("memory", POINTER),
        *((name, LONG) for name in ("rank", "size", "max_threads", "slot_bytes", "data_offset")),
        ("deadline_seconds", ctypes.c_double),
    )


def shared_bytes(size: int) -> int:
    """Return the bytes of memory that a group of `size` ranks shares. They are zero at first."""
    return _data_offset(size) + 2 * size * SLOT_BYTES


def _data_offset(size: int) -> int:
    flags = LINE_BYTES * (1 + size * MAX_THREADS)
    return -(-flags // PAGE_BYTES) * PAGE_BYTES


@dataclass(frozen=True, slots=True)
class SharedComm:
    """See `weft_kernels.collectives.Comm`. `address`: where this process has mapped the group's memory."""

    rank: int
    size: int
    address: int
    deadline_seconds: float = DEADLINE_SECONDS

    @property
    def native(self) -> ctypes.Structure:
        """The group as native kernels take it."""
        sizes = self.rank, self.size, MAX_THREADS, SLOT_BYTES, _data_offset(self.size)
        return _Group(self.address, *sizes, self.deadline_seconds)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum, in the memory of `x` if that is contiguous. Raises GroupLost."""
        x = x.contiguous()
        if x.numel():
            function = getattr(_library(), f"weft_shared_sum_{SUFFIXES[x.dtype]}")
            self._check(function(ctypes.byref(self.native), x.data_ptr(), x.numel()))
        return x

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """Return the columns of all ranks on the leader, `x` elsewhere; meets also without rows. Raises GroupLost."""
        x = x.contiguous()
        out = x.new_empty(len(x), sum(widths)) if self.rank == 0 else x
        sizes = (LONG * self.size)(*(width * x.itemsize for width in widths))
        arguments = x.data_ptr(), len(x), ctypes.byref(sizes), out.data_ptr()
        self._check(_library().weft_shared_gather(ctypes.byref(self.native), *arguments))
        return out

    def lose(self) -> None:
        """End all waiting, now and later: a rank is known to be gone."""
        ctypes.c_uint32.from_address(self.address).value = self.size + 1

    def check(self) -> None:
        """Raise GroupLost if a kernel that sums over ranks could not."""
        self._check(not ctypes.c_uint32.from_address(self.address).value)

    def _check(self, is_whole: int) -> None:
        if not is_whole:
            late = ctypes.c_uint32.from_address(self.address).value - 1
            silence = f"rank {late} did not answer for {self.deadline_seconds:g} s"
            raise GroupLost(silence if late < self.size else "a rank is gone")


def _library() -> ctypes.CDLL:
    library = native_library()
    if library is None:
        raise RuntimeError("groups on a CPU need the C++ kernels: install a compiler, unset WEFT_CPU_KERNELS=torch")
    return library
