"""Indexes of blocks, bookkeeping only: `MemoryIndex` of the store's memory, `PoolIndex` of the workers' pools.

`MemoryIndex` holds what workers reported; a block may have been evicted since.

`PoolIndex` is a hint for routing. A block costs 83 bytes (`loadtest.kv.index`), however many workers hold it: 64 bits
of its key map to a set of workers, an integer that blocks with the same workers share. A worker that misses a report,
restarts or falls silent starts again with a snapshot.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from weft import metrics
from weft.kv.block_pool import KEY_BYTES
from weft.request import KEEP, Retention

MAX_MEMORY_BLOCKS = 262_144  # about 100 MB
SWEEP_BLOCKS = 4096  # of either index, before the event loop gets a turn
MAX_POOL_BLOCKS = 4_194_304  # over all workers; more are not remembered
SILENCE_SECONDS = 15.0
SHORT_BYTES = 8
MAX_SETS = 65_536  # shared sets of workers; above this the table is rebuilt, and some are stored twice
metrics.init_series(metrics.TIER_EVICTIONS, ("dram",), ("room", "expired", "quota", "gone"))
Name = tuple[bytes, bytes]  # of a block: digest of the model's fingerprint, key


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block in the store. `checksum`: `object_checksum` of its bytes. `stored_at`: seconds since the epoch."""

    key: bytes
    checksum: int
    size_bytes: int
    tenant: bytes = b""
    stored_at: float = 0.0
    retention: Retention = KEEP


@dataclass(frozen=True, slots=True)
class IndexLimits:
    """Limits of the memory index; 0 means no limit. `tenant_bytes`: memory that one tenant may fill."""

    max_blocks: int = MAX_MEMORY_BLOCKS
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


@dataclass(frozen=True, slots=True)
class BlockReport:
    """Changes in a worker's pool, numbered without gaps. A snapshot replaces all earlier reports."""

    worker_id: str
    boot_id: str
    fingerprint: bytes
    sequence: int
    is_snapshot: bool
    stored: Sequence[bytes]
    removed: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class WorkerMatch:
    """A worker with the first `num_blocks` blocks of a prompt."""

    worker_id: str
    boot_id: str
    num_blocks: int


@dataclass(slots=True)
class _Worker:
    boot_id: str
    fingerprint: bytes
    bit: int
    next_sequence: int
    heard_at: float


@dataclass(slots=True)
class _Model:
    """Blocks of one model: short key -> bits of the workers that have it. `live`: the bits in use."""

    blocks: dict[bytes, int] = field(default_factory=dict)
    live: int = 0
    dead: int = 0
    # equal sets share one object
    sets: dict[int, int] = field(default_factory=dict)


class PoolIndex:
    """Call `sweep` periodically and run it to its end: it forgets silent workers in small steps."""

    def __init__(self, max_blocks: int = MAX_POOL_BLOCKS, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_blocks = max_blocks
        self._clock = clock
        self._models: dict[bytes, _Model] = {}
        self._workers: dict[str, _Worker] = {}

    def __len__(self) -> int:
        return sum(len(model.blocks) for model in self._models.values())

    def report(self, report: BlockReport) -> bool:
        """Apply a report; False if an earlier one is missing and a snapshot is needed."""
        worker = self._workers.get(report.worker_id)
        if report.is_snapshot:
            worker = self._begin(report)
        elif worker is None or (worker.boot_id, worker.fingerprint) != (report.boot_id, report.fingerprint):
            return False
        elif report.sequence < worker.next_sequence:
            return True  # repeated report
        elif report.sequence > worker.next_sequence:
            self._leave(report.worker_id)
            return False
        worker.next_sequence = report.sequence + 1
        worker.heard_at = self._clock()
        self._apply(self._models[report.fingerprint], worker.bit, report)
        metrics.INDEX_BLOCKS.set(len(self))
        return True

    def locate(self, fingerprint: bytes, keys: Sequence[bytes]) -> list[WorkerMatch]:
        """Return every worker that has leading blocks, the one with the most first."""
        model = self._models.get(fingerprint)
        if model is None:
            return []
        alive, num_of = model.live, dict[int, int]()
        for place, key in enumerate(keys):
            now = alive & model.blocks.get(_short(key), 0)
            if now != alive:
                num_of |= dict.fromkeys(_bits(alive ^ now), place)
                alive = now
                if not now:
                    break
        num_of |= dict.fromkeys(_bits(alive), len(keys))
        matches = [
            WorkerMatch(worker_id, worker.boot_id, num_of[worker.bit])
            for worker_id, worker in self._workers.items()
            if worker.fingerprint == fingerprint and num_of[worker.bit]
        ]
        return sorted(matches, key=lambda match: -match.num_blocks)

    def sweep(self) -> Iterator[None]:
        """Forget silent workers; yields after every SWEEP_BLOCKS blocks."""
        now = self._clock()
        for worker_id in [name for name, each in self._workers.items() if now - each.heard_at > SILENCE_SECONDS]:
            self._leave(worker_id)
        for fingerprint, model in list(self._models.items()):
            if model.dead:
                yield from self._purge(model)
            if not model.live and not model.dead:
                del self._models[fingerprint]
        metrics.INDEX_BLOCKS.set(len(self))

    def _begin(self, report: BlockReport) -> _Worker:
        self._leave(report.worker_id)
        model = self._models.setdefault(report.fingerprint, _Model())
        taken, bit = model.live | model.dead, 1
        while taken & bit:
            bit <<= 1
        model.live |= bit
        worker = _Worker(report.boot_id, report.fingerprint, bit, report.sequence, self._clock())
        self._workers[report.worker_id] = worker
        return worker

    def _leave(self, worker_id: str) -> None:
        """Remove a worker at once; its bit is free after the next sweep."""
        worker = self._workers.pop(worker_id, None)
        if worker is not None:
            model = self._models[worker.fingerprint]
            model.live &= ~worker.bit
            model.dead |= worker.bit

    def _apply(self, model: _Model, bit: int, report: BlockReport) -> None:
        blocks, sets, room = model.blocks, model.sets, self._max_blocks - len(self)
        if len(sets) > MAX_SETS:  # most belong to no block any more
            sets.clear()
        for key in report.removed:
            self._keep(model, _short(key), blocks.get(_short(key), 0) & ~bit)
        for key in report.stored:
            short = _short(key)
            before = blocks.get(short)
            if before is None:
                if room <= 0:
                    continue
                room -= 1
            now = (before or 0) | bit
            blocks[short] = sets.setdefault(now, now)

    def _purge(self, model: _Model) -> Iterator[None]:
        dead = model.dead
        for number, key in enumerate(list(model.blocks), start=1):
            bits = model.blocks.get(key, 0)
            if bits & dead:
                self._keep(model, key, bits & ~dead)
            if number % SWEEP_BLOCKS == 0:
                yield
        model.dead &= ~dead
        model.sets = {bits: bits for bits in set(model.blocks.values())}

    def _keep(self, model: _Model, key: bytes, bits: int) -> None:
        if bits:
            model.blocks[key] = model.sets.setdefault(bits, bits)
        else:
            model.blocks.pop(key, None)


def _short(key: bytes) -> bytes:
    """Return 64 bits of the hash, and the suffix that distinguishes a group's pages."""
    return key[:SHORT_BYTES] + key[KEY_BYTES:] if len(key) > KEY_BYTES else key[:SHORT_BYTES]


def _bits(bits: int) -> Iterator[int]:
    while bits:
        bit = bits & -bits
        yield bit
        bits ^= bit
