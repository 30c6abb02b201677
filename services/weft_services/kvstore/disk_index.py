"""Index of the blocks on disk: where each lies, its tenant, and when it expires. Bookkeeping only.

A tenant over its share loses its own oldest blocks. Their bytes stay in the segment until it is freed; `live_bytes`
counts what is still valid. An entry takes 380 bytes of memory, 480 with tenant shares (`loadtest.kv.index`).
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from weft import metrics
from weft_services.kvstore.segment import FINGERPRINT_BYTES, HEADER_BYTES, RecordHeader, Segment

SWEEP_BLOCKS = 4096
metrics.init_series(metrics.TIER_EVICTIONS, ("nvme",), ("room", "expired", "quota", "damaged", "replaced"))


@dataclass(frozen=True, slots=True)
class DiskLimits:
    """Limits of the disk tier. `ttl_seconds` 0: no expiry. `tenant_share`: the share that one tenant may fill."""

    max_bytes: int
    ttl_seconds: float = 0.0
    tenant_share: float = 1.0
    max_blocks: int = 1_000_000


@dataclass(slots=True)
class DiskBlock:
    """Position and header of a block on disk; `tenant` is set only if tenants are limited."""

    segment: Segment
    offset: int
    tenant: bytes
    size_bytes: int
    checksum: int
    stored_at: float
    idle_seconds: int
    used_at: float  # steady clock; after a restart, the time it was stored
    was_read: bool = False

    @property
    def record_bytes(self) -> int:
        """Size of the record in its file."""
        return HEADER_BYTES + self.size_bytes


class DiskIndex:
    """Blocks by name: the digest of the model's fingerprint, then the key."""

    def __init__(
        self, limits: DiskLimits, clock: Callable[[], float], steady: Callable[[], float] = time.monotonic
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._steady = steady
        self._blocks: dict[bytes, DiskBlock] = {}
        self._names_of: dict[int, list[bytes]] = {}  # by segment number; some blocks may have moved or been forgotten
        self._live_bytes: Counter[int] = Counter()
        self._tenant_bytes: Counter[bytes] = Counter()  # both only if tenants are limited
        self._tenant_names: dict[bytes, OrderedDict[bytes, None]] = {}
        self._num_idle = 0
        self._to_sweep: list[bytes] = []
        self._shared: dict[bytes, bytes] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, name: bytes) -> bool:
        return name in self._blocks

    def get(self, name: bytes) -> DiskBlock | None:
        """Return the block without marking it as used."""
        return self._blocks.get(name)

    def find(self, name: bytes) -> DiskBlock | None:
        """Return the block unless it has expired, and mark it as used."""
        block = self._blocks.get(name)
        if block is None:
            return None
        if self.is_too_old(block):
            self.forget(name, "expired")
            return None
        block.used_at = self._steady()
        return block

    def live_bytes(self, segment: Segment) -> int:
        """Return the bytes of the segment's records that are still valid."""
        return self._live_bytes[segment.number]

    def live_names(self, segment: Segment) -> list[bytes]:
        """Return the segment's valid blocks in file order, each once."""
        names = dict.fromkeys(self._names_of.get(segment.number, ()))
        return [name for name in names if (block := self._blocks.get(name)) and block.segment is segment]

    def enter(self, segment: Segment, offset: int, header: RecordHeader, is_new: bool = False) -> None:
        """Add a record; it replaces an earlier one of the same name, unless that is in a newer segment."""
        name = header.fingerprint + header.key
        if known := self._blocks.get(name):
            if known.segment.number > segment.number:
                return
            self.forget(name, "replaced")
        if not self._make_tenant_room(header, segment):
            return
        age_seconds = 0.0 if is_new else max(0.0, self._clock() - header.stored_at)
        tenant = self._shared.setdefault(header.tenant, header.tenant) if self._limits.tenant_share < 1 else b""
        self._put(
            name,
            DiskBlock(
                *(segment, offset, tenant, header.size_bytes, header.checksum),
                *(header.stored_at, header.idle_seconds, self._steady() - age_seconds),
            ),
        )

    def move(self, name: bytes, block: DiskBlock, segment: Segment, offset: int, was_read: bool) -> None:
        """Record a new position, unless the block was forgotten meanwhile."""
        if self._blocks.get(name) is block:
            self._live_bytes[block.segment.number] -= block.record_bytes
            # a read in progress continues with the old position
            moved = replace(block, segment=segment, offset=offset, was_read=was_read)
            self._blocks[name] = moved
            self._place(name, moved)

    def forget(self, name: bytes, reason: str) -> None:
        """Remove a block from the index."""
        block = self._blocks.pop(name)
        self._live_bytes[block.segment.number] -= block.record_bytes
        self._num_idle -= bool(block.idle_seconds)
        if names := self._tenant_names.get(block.tenant):
            del names[name]
            self._tenant_bytes[block.tenant] -= block.record_bytes
            if not names:
                del self._tenant_names[block.tenant], self._tenant_bytes[block.tenant], self._shared[block.tenant]
        metrics.TIER_EVICTIONS.labels("nvme", reason).inc()

    def forget_segment(self, segment: Segment) -> None:
        """Remove all blocks of a segment."""
        for name in self.live_names(segment):
            self.forget(name, "room")
        self._names_of.pop(segment.number, None)
        del self._live_bytes[segment.number]

    def is_too_old(self, block: DiskBlock) -> bool:
        """Return whether the block was idle for longer than its header allows, or is older than the TTL."""
        if block.idle_seconds and self._steady() - block.used_at > block.idle_seconds:
            return True
        return bool(self._limits.ttl_seconds) and self._clock() - block.stored_at > self._limits.ttl_seconds

    def sweep(self) -> None:
        """Forget the expired ones among the next SWEEP_BLOCKS blocks; call periodically."""
        if not self._to_sweep and (self._num_idle or self._limits.ttl_seconds):
            self._to_sweep = list(self._blocks)
        for name in self._to_sweep[-SWEEP_BLOCKS:]:
            block = self._blocks.get(name)
            if block is not None and self.is_too_old(block):
                self.forget(name, "expired")
        del self._to_sweep[-SWEEP_BLOCKS:]

    def _put(self, name: bytes, block: DiskBlock) -> None:
        self._blocks[name] = block
        self._num_idle += bool(block.idle_seconds)
        self._place(name, block)
        if self._limits.tenant_share < 1:
            self._tenant_bytes[block.tenant] += block.record_bytes
            self._tenant_names.setdefault(block.tenant, OrderedDict())[name] = None

    def _place(self, name: bytes, block: DiskBlock) -> None:
        self._live_bytes[block.segment.number] += block.record_bytes
        self._names_of.setdefault(block.segment.number, []).append(name)

    def _make_tenant_room(self, header: RecordHeader, segment: Segment) -> bool:
        """Make room in the tenant's share; False if only newer blocks are left, while old segments load."""
        quota = self._limits.tenant_share * self._limits.max_bytes
        names, num_newer = self._tenant_names.get(header.tenant), 0
        while names and self._tenant_bytes[header.tenant] + header.record_bytes > quota:
            oldest = next(iter(names))
            if self._blocks[oldest].segment.number <= segment.number:
                self.forget(oldest, "quota")
                continue
            if num_newer == len(names):
                return False
            names.move_to_end(oldest)
            num_newer += 1
        return True


def header_of(name: bytes, block: DiskBlock) -> RecordHeader:
    """Return the block's header as it is on disk."""
    fingerprint, key = name[:FINGERPRINT_BYTES], name[FINGERPRINT_BYTES:]
    stored = (block.size_bytes, block.checksum, block.stored_at, block.idle_seconds)
    return RecordHeader(fingerprint, block.tenant, key, *stored)
