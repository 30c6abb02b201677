"""A worker's block pool without an engine, and a store client on top of it."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import torch

from tests.services.kvstore.node import until
from weft.kv.block_pool import FullBlock
from weft.kv.memfd import create_shared_memory
from weft.kv.transfer import BlockBytes, HostBlocks
from weft.request import KEEP, ModelFingerprint, Retention
from weft.worker.pool_memory import TensorBlocks
from weft.worker.store_client import StoreClient
from weft.worker.store_reader import FetchCostModel

BLOCK_BYTES = 96 * 1024


def key(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=32).digest()


def content(number: int) -> bytes:
    """Return the bytes of the block with this key."""
    return hashlib.shake_128(key(number)).digest(BLOCK_BYTES)


class Worker:
    """Blocks in shared memory and a record of what was unpinned. `is_far`: only torch reaches them, as on a GPU."""

    def __init__(self, address: str, model: str = "model", num_blocks: int = 512, is_far: bool = False) -> None:
        shared = create_shared_memory(num_blocks * BLOCK_BYTES, "weft-kv-pool")
        assert shared is not None
        pool = torch.frombuffer(shared.mapping, dtype=torch.uint8).view(num_blocks, -1)
        self._bytes = memoryview(shared.mapping)
        self.unpinned: list[int] = []
        near = HostBlocks(pool.data_ptr(), BLOCK_BYTES, num_blocks, shared.fd)
        memory: BlockBytes = TensorBlocks(pool) if is_far else near
        fingerprint = ModelFingerprint(model, "float32", 16, BLOCK_BYTES, "layout-1")
        self.estimate = FetchCostModel(16, 512)
        self.store = StoreClient(address, memory, fingerprint, self.unpinned.extend, self.estimate)

    def write(self, block: int, data: bytes) -> None:
        self._bytes[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] = data

    def read(self, block: int) -> bytes:
        return bytes(self._bytes[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES])

    def offer(self, numbers: Sequence[int], tenant: bytes = b"", retention: Retention = KEEP) -> None:
        """Write these blocks to the pool blocks of the same number, and offer them."""
        for number in numbers:
            self.write(number, content(number))
        self.store.offer([FullBlock(key(number), number, tenant, retention) for number in numbers])


@asynccontextmanager
async def working(worker: Worker) -> AsyncIterator[Worker]:
    """Connect a worker, and close it at the end of the scope."""
    await worker.store.connect()
    try:
        if worker.store._address:  # the first attempt may take longer than `connect` waits
            await until("the store is connected", lambda: worker.store.is_connected)
        yield worker
    finally:
        await worker.store.close()
