"""Memory that one step gave back is the next one's, and what a process has imported is its own for good. Knows the
allocator and the collector, not what the memory is for."""

from __future__ import annotations

import ctypes
import gc

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
# the largest that glibc takes
MOST_TRIM_BYTES, MOST_MMAP_BYTES = 2**31 - 1, 32 * 2**20


def settle_imports() -> None:
    """At the start of a process: modules are no longer looked at for cycles, which stops an engine for a tenth of a
    second each time."""
    gc.freeze()


def keep_heap() -> None:
    """Have malloc give nothing back to the system, as it does otherwise with whatever is large: a step takes about as
    much as the one before, and each of its pages would have to be cleared and mapped again.

    Changes nothing where the C library knows of no such choice.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, MOST_TRIM_BYTES)
        mallopt(M_MMAP_THRESHOLD, MOST_MMAP_BYTES)
