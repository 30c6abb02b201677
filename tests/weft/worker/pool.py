"""A worker's block pool without an engine, and a store client on top of it."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from weft.engine.messages import PoolMemory, SealedBlock
from weft.request import KEEP, ModelFingerprint, Retention
from weft.worker.estimate import FetchEstimate
from weft.worker.store import StoreClient

BLOCK_BYTES = 96 * 1024


def key(number: int) -> bytes:
    """A block key."""
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=32).digest()


def content(number: int) -> bytes:
    """The bytes of the block with that key."""
    return hashlib.shake_128(key(number)).digest(BLOCK_BYTES)


class Worker:
    """Blocks in memory and a record of what was unpinned."""

    def __init__(self, address: str, model: str = "model", num_blocks: int = 512) -> None:
        self._bytes = (ctypes.c_ubyte * (num_blocks * BLOCK_BYTES))()
        self.unpinned: list[int] = []
        pool = PoolMemory(ctypes.addressof(self._bytes), BLOCK_BYTES, num_blocks)
        fingerprint = ModelFingerprint(model, "float32", 16, BLOCK_BYTES, "layout-1")
        self.store = StoreClient(address, pool, fingerprint, self.unpinned.extend, FetchEstimate(16, 512))

    def write(self, block: int, data: bytes) -> None:
        """Fill a block."""
        memoryview(self._bytes).cast("B")[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] = data

    def read(self, block: int) -> bytes:
        """A copy of a block."""
        return bytes(memoryview(self._bytes).cast("B")[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES])

    def offer(self, numbers: Sequence[int], tenant: bytes = b"", retention: Retention = KEEP) -> None:
        """Compute these blocks, each into the pool's block of its number, and offer them."""
        for number in numbers:
            self.write(number, content(number))
        self.store.offer([SealedBlock(key(number), number, tenant, retention) for number in numbers])


@asynccontextmanager
async def working(worker: Worker) -> AsyncIterator[Worker]:
    """Connected, and closed in the end."""
    await worker.store.connect()
    try:
        yield worker
    finally:
        await worker.store.close()
