"""Pages of a pool in host memory, made before somebody waits for them: the kernel takes longer over the first byte of a
page than over all the others. Knows how many blocks are in use, nothing of what they hold.

Only so many bytes beyond what is in use, as a pool has room for more than most workers ever need.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from weft.engine.messages import EngineLoad
from weft.kv.memory import BlockBytes

AHEAD_BYTES = 256 * 1024 * 1024
# at a time: whoever wants another map of this process waits for so much. That is why the thread is as urgent as any:
# one that stood back on busy cores would stand there with the process' maps locked
STEP_BYTES = 256 * 1024
LOOK_SECONDS = 0.2
# Linux 5.14; what is there already stays as it is
MADV_POPULATE_WRITE = 23


class PagesAhead:
    """Of one pool, which hands out the lowest numbers first."""

    def __init__(self, memory: BlockBytes, load: Callable[[], EngineLoad]) -> None:
        self._memory = memory
        self._load = load
        self._made_bytes = 0

    async def run(self) -> None:
        """Until all pages are there, or the kernel has none or does not know how; or until cancelled."""
        if self._memory.shared_fd is None:
            return
        total = self._memory.num_blocks * self._memory.block_bytes
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, "weft-pages") as thread:
            while self._made_bytes < total:
                goal = min(self._num_used() * self._memory.block_bytes + AHEAD_BYTES, total)
                if self._made_bytes >= goal:
                    await asyncio.sleep(LOOK_SECONDS)
                    continue
                end = min(self._made_bytes + STEP_BYTES, goal)
                if not await loop.run_in_executor(thread, partial(self._make, end)):
                    return
                self._made_bytes = end

    def _num_used(self) -> int:
        load = self._load()
        return load.active_blocks + load.cached_blocks + load.quarantined_blocks

    def _make(self, end: int) -> bool:
        start = self._made_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        address = ctypes.c_void_p(self._memory.address + start)
        error: int = _libc().madvise(address, ctypes.c_size_t(end - start), MADV_POPULATE_WRITE)
        return error == 0


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
