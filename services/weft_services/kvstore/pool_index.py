"""Index of the blocks in workers' pools, from their reports. A hint for routing; bookkeeping only.

A block costs 83 bytes (`loadtest.kv.index`), however many workers hold it. 64 bits of its key map to a set of workers,
an integer that blocks with the same workers share. A worker that misses a report, restarts or falls silent starts again
with a snapshot.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from weft import metrics
from weft.kv.block_keys import KEY_BYTES

MAX_BLOCKS = 4_194_304  # over all workers; more are not remembered
SILENCE_SECONDS = 15.0
SHORT_BYTES = 8
SWEEP_KEYS = 4096
MAX_SETS = 65_536  # shared sets of workers; above this the table is rebuilt, and some are stored twice


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

    def __init__(self, max_blocks: int = MAX_BLOCKS, clock: Callable[[], float] = time.monotonic) -> None:
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
        """Forget silent workers; yields after every SWEEP_KEYS blocks."""
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
            if number % SWEEP_KEYS == 0:
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
