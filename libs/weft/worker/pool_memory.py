"""The pool's bytes: access for transports and checks, and prefault of host pages.

Prefault touches pages before they are needed: the kernel takes longer over a page's first byte than over all others. It
stays at most AHEAD_BYTES ahead of use, since most workers never need the whole pool.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from weft.engine.messages import EngineLoad, PoolMemory
from weft.kv.layer_groups import Unit
from weft.kv.transfer import BlockBytes, HostBlocks, whole_page

AHEAD_BYTES = 256 * 1024 * 1024
# Pages touched at a time. Other mappings of this process wait for that long. So the thread keeps normal priority: at
# low priority it could be preempted while it holds the mmap lock.
STEP_BYTES = 256 * 1024
LOOK_SECONDS = 0.2
# Linux 5.14; pages that exist stay unchanged.
MADV_POPULATE_WRITE = 23


def open_blocks(pool: PoolMemory, device: str) -> BlockBytes:
    """Return access to this process' pool on "cpu" or "cuda"."""
    if device == "cpu":
        return HostBlocks(pool.address, pool.block_bytes, pool.num_blocks, pool.shared_fd, pool.units)
    return TensorBlocks(torch.as_tensor(_DeviceMemory(pool), device=device), pool.units)


class TensorBlocks:
    """A pool that only torch can access.

    Copies run on their own CUDA stream and do not wait for engine steps. So copied-out blocks must be final, and blocks
    that are copied in must stay unused until the copy is done.
    """

    is_host = False
    shared_fd = None

    def __init__(self, pool: Tensor, units: tuple[tuple[Unit, ...], ...] = ()) -> None:
        """`pool`: uint8 [num_blocks, block_bytes], contiguous. `units`: a page is one unit if they are not given."""
        assert pool.is_contiguous()
        assert pool.dtype == torch.uint8
        self._pool = pool
        self.address = pool.data_ptr()
        self.num_blocks, self.block_bytes = pool.shape
        self.units = units or whole_page(self.block_bytes)
        self._aside = torch.cuda.Stream(pool.device) if pool.is_cuda else None  # type: ignore[no-untyped-call]

    def copy_out(self, blocks: Sequence[int], area: memoryview) -> None:
        self._copy([(row, self._pool[block]) for row, block in zip(self._rows(area), blocks, strict=True)])

    def copy_in(self, area: memoryview, blocks: Sequence[int]) -> None:
        self._copy([(self._pool[block], row) for row, block in zip(self._rows(area), blocks, strict=True)])

    def _rows(self, area: memoryview) -> Sequence[Tensor]:
        # Copy block by block: gathering first would need device memory, which the pool has filled.
        return torch.frombuffer(area, dtype=torch.uint8).view(-1, self.block_bytes).unbind() if area else ()

    def _copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        with torch.cuda.stream(self._aside):  # no stream on a CPU
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        if self._aside is not None:
            self._aside.synchronize()

    def read(self, block: int) -> memoryview:
        """Return a copy of the block."""
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"no block {block} in a pool of {self.num_blocks}")
        copied = torch.empty(self.block_bytes, dtype=torch.uint8)
        self._copy([(copied, self._pool[block])])
        return memoryview(copied.numpy())  # type: ignore[arg-type]

    def write(self, block: int, offset_bytes: int, data: bytes) -> None:
        if not 0 <= block < self.num_blocks or not 0 <= offset_bytes <= self.block_bytes - len(data):
            raise ValueError(f"{len(data)} bytes at {offset_bytes} do not fit into block {block}")
        if data:
            source = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            self._copy([(self._pool[block, offset_bytes : offset_bytes + len(data)], source)])


class _DeviceMemory:
    """Device memory by address, in the form that torch maps without copying."""

    def __init__(self, pool: PoolMemory) -> None:
        self.__cuda_array_interface__ = {
            "shape": (pool.num_blocks, pool.block_bytes),
            "typestr": "|u1",
            "data": (pool.address, False),
            "version": 3,
        }


class PoolPrefaulter:
    """Prefaults one pool, which hands out its lowest block numbers first."""

    def __init__(self, memory: BlockBytes, load: Callable[[], EngineLoad]) -> None:
        self._memory = memory
        self._load = load
        self._made_bytes = 0

    async def run(self) -> None:
        """Run until all pages exist, the kernel refuses, or the task is cancelled."""
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
