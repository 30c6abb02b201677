"""Which block lies in the store's memory, as far as workers have said; it may be gone since. Pure bookkeeping."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from weft import metrics

MAX_BLOCKS = 262_144  # about 100 MB


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block, the xxh3_64 of its bytes, whose it is and since when (seconds since the epoch)."""

    key: bytes
    checksum: int
    size_bytes: int
    tenant: bytes = b""
    stored_at: float = 0.0


class BlockIndex:
    """Least recently matched blocks are forgotten first. Models are told apart by the digest of their fingerprint.

    With `ttl_seconds` a block is not found any more so long after it was stored.
    """

    def __init__(
        self, max_blocks: int = MAX_BLOCKS, ttl_seconds: float = 0.0, clock: Callable[[], float] = time.time
    ) -> None:
        self._max_blocks = max_blocks
        self._ttl_seconds = ttl_seconds
        self._clock = clock
        self._blocks: OrderedDict[tuple[bytes, bytes], StoredBlock] = OrderedDict()
        self.used_bytes = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, fingerprint: bytes, blocks: Iterable[StoredBlock]) -> None:
        """The newest word on a key counts."""
        for block in blocks:
            self._forget((fingerprint, block.key))
            self._blocks[fingerprint, block.key] = block
            self.used_bytes += block.size_bytes
        while len(self._blocks) > self._max_blocks:
            self._forget(next(iter(self._blocks)))
            metrics.TIER_EVICTIONS.labels("dram", "room").inc()
        self._tell()

    def find(self, fingerprint: bytes, key: bytes) -> StoredBlock | None:
        """The block, if it is known and not too old."""
        block = self._blocks.get((fingerprint, key))
        if block is None:
            return None
        if self._ttl_seconds and self._clock() - block.stored_at > self._ttl_seconds:
            self._forget((fingerprint, key))
            metrics.TIER_EVICTIONS.labels("dram", "expired").inc()
            return None
        self._blocks.move_to_end((fingerprint, key))
        return block

    def drop(self, fingerprint: bytes, blocks: Iterable[StoredBlock]) -> None:
        """They are gone from the store, unless somebody has put other bytes meanwhile."""
        for block in blocks:
            if self._blocks.get((fingerprint, block.key)) == block:
                self._forget((fingerprint, block.key))
                metrics.TIER_EVICTIONS.labels("dram", "gone").inc()
        self._tell()

    def clear(self) -> None:
        """The store has been started anew."""
        self._blocks.clear()
        self.used_bytes = 0
        self._tell()

    def _forget(self, name: tuple[bytes, bytes]) -> None:
        block = self._blocks.pop(name, None)
        if block is not None:
            self.used_bytes -= block.size_bytes

    def _tell(self) -> None:
        metrics.TIER_BLOCKS.labels("dram").set(len(self._blocks))
        metrics.TIER_BYTES_USED.labels("dram").set(self.used_bytes)
