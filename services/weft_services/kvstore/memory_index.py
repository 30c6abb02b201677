"""Index of the blocks in the store's memory, as reported by workers; a block may have been evicted since.

Bookkeeping only.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from weft import metrics
from weft.request import KEEP, Retention

MAX_BLOCKS = 262_144  # about 100 MB
SWEEP_BLOCKS = 4096
metrics.init_series(metrics.TIER_EVICTIONS, ("dram",), ("room", "expired", "quota", "gone"))
Name = tuple[bytes, bytes]  # of a block: digest of the model's fingerprint, key


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block in the store. `checksum`: xxh3_64 of its bytes. `stored_at`: seconds since the epoch."""

    key: bytes
    checksum: int
    size_bytes: int
    tenant: bytes = b""
    stored_at: float = 0.0
    retention: Retention = KEEP


@dataclass(frozen=True, slots=True)
class IndexLimits:
    """Limits of the memory index; 0 means no limit. `tenant_bytes`: memory that one tenant may fill."""

    max_blocks: int = MAX_BLOCKS
    ttl_seconds: float = 0.0
    tenant_bytes: int = 0
    max_bytes: int = 0


class MemoryIndex:
    """Blocks by fingerprint digest and key; the least recently matched are forgotten first.

    A block expires after the idle time of its own retention, or after the TTL.
    """

    def __init__(
        self,
        limits: IndexLimits | None = None,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock` is the clock of `stored_at`; `steady` measures the time since a use."""
        self._limits = limits or IndexLimits()
        self._clock = clock
        self._steady = steady
        self._blocks: OrderedDict[Name, StoredBlock] = OrderedDict()
        self._used_at: dict[Name, float] = {}  # only of blocks with an idle time
        self._tenant_bytes: Counter[bytes] = Counter()
        self._tenant_names: dict[bytes, OrderedDict[Name, None]] = {}  # only if tenants are limited
        # expired blocks seen by `find`, returned by the next `add` or `sweep`
        self._found_old: list[tuple[bytes, StoredBlock]] = []
        self._to_sweep: list[Name] = []
        self.used_bytes = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, fingerprint: bytes, blocks: Iterable[StoredBlock]) -> list[tuple[bytes, StoredBlock]]:
        """Add or replace blocks; return the blocks to evict, with their fingerprints.

        Blocks beyond `max_bytes` are forgotten and not returned: the store has evicted as much by itself.
        """
        gone = self._take_found_old()
        for block in blocks:
            name = fingerprint, block.key
            before = self._forget(name)
            if before is not None and before.checksum != block.checksum:
                gone.append((fingerprint, before))  # other bytes, stored under another name
            gone += self._make_tenant_room(block)
            self._enter(name, block)
        while len(self._blocks) > self._limits.max_blocks:
            gone.append(self._evict(next(iter(self._blocks)), "room"))
        while 0 < self._limits.max_bytes < self.used_bytes:
            self._evict(next(iter(self._blocks)), "gone")
        self._publish_metrics()
        return gone

    def find(self, fingerprint: bytes, key: bytes) -> StoredBlock | None:
        """Return the block if it is known and has not expired, and mark it as used."""
        name = fingerprint, key
        block = self._blocks.get(name)
        if block is None:
            return None
        if self._is_too_old(name, block):
            self._found_old.append(self._evict(name, "expired"))
            return None
        self._blocks.move_to_end(name)
        if name in self._used_at:
            self._used_at[name] = self._steady()
        if block.tenant in self._tenant_names:
            self._tenant_names[block.tenant].move_to_end(name)
        return block

    def has(self, fingerprint: bytes, block: StoredBlock) -> bool:
        """Return whether the block is known with exactly these bytes; does not mark it as used."""
        known = self._blocks.get((fingerprint, block.key))
        return known is not None and known.checksum == block.checksum

    def drop(self, fingerprint: bytes, blocks: Iterable[StoredBlock]) -> None:
        """Forget blocks that the store has lost, unless they were stored again with other bytes."""
        for block in blocks:
            if self._blocks.get((fingerprint, block.key)) == block:
                self._evict((fingerprint, block.key), "gone")
        self._publish_metrics()

    def sweep(self) -> list[tuple[bytes, StoredBlock]]:
        """Forget and return the expired ones among the next SWEEP_BLOCKS blocks; call periodically."""
        if not self._to_sweep and (self._used_at or self._limits.ttl_seconds):
            self._to_sweep = list(self._blocks)
        gone = self._take_found_old()
        gone += [
            self._evict(name, "expired")
            for name in self._to_sweep[-SWEEP_BLOCKS:]
            if (block := self._blocks.get(name)) is not None and self._is_too_old(name, block)
        ]
        del self._to_sweep[-SWEEP_BLOCKS:]
        self._publish_metrics()
        return gone

    def _take_found_old(self) -> list[tuple[bytes, StoredBlock]]:
        found, self._found_old = self._found_old, []
        return found

    def clear(self) -> None:
        """Forget everything: the store has restarted."""
        self._found_old.clear()
        for books in (self._blocks, self._used_at, self._tenant_bytes, self._tenant_names):
            books.clear()
        self.used_bytes = 0
        self._publish_metrics()

    def _is_too_old(self, name: Name, block: StoredBlock) -> bool:
        idle_seconds, ttl_seconds = block.retention.idle_seconds, self._limits.ttl_seconds
        if idle_seconds and self._steady() - self._used_at[name] > idle_seconds:
            return True
        return bool(ttl_seconds) and self._clock() - block.stored_at > ttl_seconds

    def _make_tenant_room(self, block: StoredBlock) -> list[tuple[bytes, StoredBlock]]:
        """Evict the tenant's own least recently used blocks until it is within its share."""
        gone: list[tuple[bytes, StoredBlock]] = []
        names = self._tenant_names.get(block.tenant)
        while names and self._tenant_bytes[block.tenant] + block.size_bytes > self._limits.tenant_bytes:
            gone.append(self._evict(next(iter(names)), "quota"))
        return gone

    def _enter(self, name: Name, block: StoredBlock) -> None:
        self._blocks[name] = block
        self.used_bytes += block.size_bytes
        if block.retention.idle_seconds:
            self._used_at[name] = self._steady()
        if self._limits.tenant_bytes:
            self._tenant_bytes[block.tenant] += block.size_bytes
            self._tenant_names.setdefault(block.tenant, OrderedDict())[name] = None

    def _evict(self, name: Name, reason: str) -> tuple[bytes, StoredBlock]:
        block = self._forget(name)
        assert block is not None
        metrics.TIER_EVICTIONS.labels("dram", reason).inc()
        return name[0], block

    def _forget(self, name: Name) -> StoredBlock | None:
        block = self._blocks.pop(name, None)
        if block is None:
            return None
        self.used_bytes -= block.size_bytes
        self._used_at.pop(name, None)
        if names := self._tenant_names.get(block.tenant):
            del names[name]
            self._tenant_bytes[block.tenant] -= block.size_bytes
            if not names:
                del self._tenant_names[block.tenant], self._tenant_bytes[block.tenant]
        return block

    def _publish_metrics(self) -> None:
        metrics.TIER_BLOCKS.labels("dram").set(len(self._blocks))
        metrics.TIER_BYTES_USED.labels("dram").set(self.used_bytes)
