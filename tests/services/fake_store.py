"""A shared store in this process, which has what a test gave it."""

from __future__ import annotations

import asyncio

from weft.kv.block_pool import Tier
from weft.kv.transfer import BlockBytes
from weft.worker.store_reader import FetchRequest, FetchResult


class FakeStore:
    """Remembers what it was asked for, and fills blocks with another worker's bytes."""

    is_connected = True

    def __init__(self) -> None:
        self.keys: list[bytes] = []
        self.source: dict[bytes, bytes] = {}
        self.target: BlockBytes | None = None
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.was_asked = asyncio.Event()

    async def fetch(self, wanted: FetchRequest, stall_seconds: float) -> FetchResult:
        self.keys += wanted.keys
        self.was_asked.set()
        await self.may_answer.wait()
        fetched = FetchResult()
        for key, block in zip(wanted.keys, wanted.blocks, strict=True):
            if key not in self.source:
                break
            assert self.target is not None
            self.target.write(block, 0, self.source[key])
            fetched.num_blocks += 1
            fetched.by_tier[Tier.DRAM] = fetched.num_blocks
        return fetched
