"""Holds all free memory of a machine, and frees it at the rate at which the measured process takes memory.

The host of a virtual machine takes free memory back and returns it slowly, at about 1 GB/s on some. On real hardware
there is no such host. Touching memory before a load and freeing it all at once would not help: the host takes it again.
So only a little is free at any time.
"""

from __future__ import annotations

import os
import tempfile
import threading
from types import TracebackType
from typing import IO, Self

from weft.weights.image import SHARED_MEMORY

BLOCK_BYTES = 4 << 20
FREE_BYTES = 640 << 20
"""Less than hosts take, and more than anybody takes between two looks."""
LARGE_BYTES = 256 << 20
"""Of that, in large pages."""
LOOK_SECONDS = 0.001


class HeldMemory:
    """Held in shared memory while this is open, but for what others take: in large pages where it has them."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._giver = threading.Thread(target=self._give, daemon=True)
        self._held = 0

    def __enter__(self) -> Self:
        with tempfile.TemporaryFile(dir=SHARED_MEMORY) as first:
            # what is taken first comes in large pages, and goes to those who read: in small ones they are half as fast
            os.ftruncate(first.fileno(), LARGE_BYTES)
            _fill(first.fileno(), LARGE_BYTES, FREE_BYTES)
            self._file: IO[bytes] = tempfile.TemporaryFile(dir=SHARED_MEMORY)
            size = max(0, free_bytes() - FREE_BYTES + LARGE_BYTES) // BLOCK_BYTES * BLOCK_BYTES
            os.ftruncate(self._file.fileno(), size)  # as large as it may get: else there would be no large pages
            self._held = _fill(self._file.fileno(), size, FREE_BYTES - LARGE_BYTES)
        self._giver.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._giver.join()
        self._file.close()

    def _give(self) -> None:
        while self._held and not self._over.is_set():
            missing = FREE_BYTES - free_bytes()
            if missing > 0:  # whole blocks, so that no large page is divided
                self._held = max(0, self._held - missing) // BLOCK_BYTES * BLOCK_BYTES
                os.ftruncate(self._file.fileno(), self._held)
            self._over.wait(LOOK_SECONDS)


def _fill(fd: int, size: int, least: int) -> int:
    """Bytes that the file has taken: `size`, or until so little is free."""
    block, taken = bytes(BLOCK_BYTES), 0
    while taken < size and free_bytes() > least + BLOCK_BYTES:
        os.pwrite(fd, block, taken)
        taken += BLOCK_BYTES
    return taken


def can_hold() -> bool:
    """Return whether shared memory may take all memory. Usually it may take half, and the measured process needs it."""
    room = os.statvfs(SHARED_MEMORY)
    return room.f_blocks * room.f_frsize >= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_bytes() -> int:
    """Of the machine's memory, as its kernel counts it."""
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemFree:"):
                return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo does not say how much memory is free")
