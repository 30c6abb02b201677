"""Values that workers, the scheduler and gateways exchange: descriptions and reports of workers, and route queries.

`weft.rpc.fleet_wire` converts them to and from messages. A new field of a report is added here and there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from weft.request import ModelFingerprint, RequestKey, WorkerAddress, WorkerRole


@dataclass(frozen=True, slots=True)
class PrefixCacheStats:
    """Prompt tokens looked up in caches, tokens found in each tier, and the time spent fetching from the store."""

    looked_up_tokens: int = 0
    pool_tokens: int = 0
    dram_tokens: int = 0
    nvme_tokens: int = 0
    dram_seconds: float = 0.0
    nvme_seconds: float = 0.0


NOTHING_LOOKED_UP = PrefixCacheStats()


@dataclass(frozen=True, slots=True)
class TransferStats:
    """KV transfers from one prefill worker to a decode worker: prompts, bytes, and failed transfers."""

    prefill_worker_id: str
    num_prompts: int = 0
    size_bytes: int = 0
    num_failed: int = 0


class DecodedRows(NamedTuple):
    """The decoding part of a step: its sequences, their rows (one each and one for each draft), and tokens gained."""

    num_sequences: int
    num_rows: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class EngineTimeStats:
    """Engine time for decoding and for prompts.

    `generating_*` counts steps that decode, their sequences (once for each step), the tokens these gained and the
    drafts they verified. `computing_seconds` counts prompt time; a mixed step contributes by its share of prompt rows.
    A first token belongs to its prompt.
    """

    generating_steps: int = 0
    generating_seconds: float = 0.0
    computing_seconds: float = 0.0
    generating_sequences: int = 0
    generating_tokens: int = 0
    generating_drafts: int = 0

    def add(self, prompt_tokens: int, decoding: DecodedRows, seconds: float) -> EngineTimeStats:
        """Return the statistics with one more step."""
        share = prompt_tokens / max(prompt_tokens + decoding.num_rows, 1)
        is_decoding = decoding.num_sequences > 0
        return EngineTimeStats(
            self.generating_steps + is_decoding,
            self.generating_seconds + (seconds if is_decoding else 0.0),
            self.computing_seconds + share * seconds,
            self.generating_sequences + decoding.num_sequences,
            self.generating_tokens + decoding.num_tokens,
            self.generating_drafts + decoding.num_rows - decoding.num_sequences,
        )


NO_ENGINE_TIME = EngineTimeStats()


@dataclass(frozen=True, slots=True)
class WorkerStats:
    """All counters of a worker's report."""

    prefix: PrefixCacheStats = NOTHING_LOOKED_UP
    transfers: tuple[TransferStats, ...] = ()
    engine_time: EngineTimeStats = NO_ENGINE_TIME


NO_STATS = WorkerStats()


# deadline of a request without one
DEFAULT_REQUEST_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class WorkerHello:
    """Description of a worker, sent when it joins. The scheduler keeps `role` up to date with the reports.

    `is_draining` is local to the worker: it joins while it drains. Its reports tell the scheduler. Workers of different
    `sampling_version` sample different tokens with the same seed; 0: the worker is too old to have one. `layout`: how
    ranks divide the model, for display; empty for one rank.
    """

    address: WorkerAddress
    role: WorkerRole
    model: str
    fingerprint: ModelFingerprint
    num_blocks: int
    max_context_tokens: int
    transport: str = ""
    metrics_address: str = ""
    can_change_role: bool = False
    is_draining: bool = False
    sampling_version: int = 0
    layout: str = ""

    @property
    def pairing(self) -> tuple[ModelFingerprint, int]:
        """What the prefill and the decode worker of a request must share: the blocks and the tokens of a seed."""
        return self.fingerprint, self.sampling_version

    @property
    def pool_tokens(self) -> int:
        """Number of tokens for which the pool has room."""
        return self.num_blocks * self.fingerprint.block_tokens


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """A worker's view of its own load. The defaults describe a worker that has not reported yet: it is not ready.

    `hand_offs` holds wire messages that pass through the scheduler unread. `stats.transfers` has them as values, where
    the reader asked for them. `role` None: the sender did not say. `full` None: the sender does not know the field.
    """

    num_running: int = 0
    num_waiting: int = 0
    queued_prefill_tokens: int = 0
    active_tokens: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    active_blocks: int = 0
    quarantined_blocks: int = 0
    ready: bool = False
    generated_tokens: int = 0
    computed_prompt_tokens: int = 0
    is_draining: bool = False
    is_asleep: bool = False
    stats: WorkerStats = NO_STATS
    hand_offs: Sequence[Any] = ()
    role: WorkerRole | None = None
    full: bool | None = None

    @property
    def is_idle(self) -> bool:
        """True while the worker holds no sequence."""
        return self.num_running == 0 and self.num_waiting == 0

    @property
    def is_full(self) -> bool:
        """True while sequences hold the whole pool; the worker then also reports that it is not ready."""
        if self.full is None:
            return self.active_blocks > 0 and self.free_blocks + self.cached_blocks == 0
        return self.full


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker as the scheduler lists it: its description, its latest report, and the load reserved on it."""

    hello: WorkerHello
    report: WorkerReport
    booked_prefill_tokens: int = 0
    booked_decode_tokens: int = 0
    booked_requests: int = 0
    report_age_ms: int = 0

    @property
    def address(self) -> WorkerAddress:
        """Id, boot id and host:port."""
        return self.hello.address

    @property
    def role(self) -> WorkerRole:
        """The role it plays now."""
        return self.hello.role

    @property
    def model(self) -> str:
        """Served name of its model."""
        return self.hello.model

    @property
    def is_serving(self) -> bool:
        """True if it takes requests, also while a full pool makes them wait."""
        return self.report.ready or self.report.is_full


@dataclass(frozen=True, slots=True)
class LoadingWorker:
    """A worker that loads its model and has not joined. `total_bytes` is 0 in phases that count no bytes."""

    worker_id: str
    role: WorkerRole
    model: str
    phase: str
    done_bytes: int = 0
    total_bytes: int = 0
    since_ms: int = 0


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """Capacity of the shared store in memory and on disk, and the bytes that blocks use. No disk: 0."""

    memory_bytes: int
    memory_used_bytes: int
    disk_bytes: int
    disk_used_bytes: int


class Priority(IntEnum):
    """Priority class of a request; the lower number is placed first."""

    INTERACTIVE = 0
    DEFAULT = 1
    BATCH = 2

    @classmethod
    def from_engine(cls, priority: int) -> Priority:
        """Class of an engine priority, where the higher number goes first and 0 is the default."""
        if priority == 0:
            return cls.DEFAULT
        return cls.INTERACTIVE if priority > 0 else cls.BATCH


@dataclass(frozen=True, slots=True)
class RouteQuery:
    """What routing needs to know about one attempt of a request.

    `remaining_seconds`: time until the client's deadline. `resumed_tokens`: tokens of the prompt that earlier attempts
    generated. `computes_prompt`: the decode worker computes the whole prompt and ignores caches. `gateway_id`: the
    gateway that settles the attempt. `sampling_version`: only workers of this version may continue; None: any.
    """

    key: RequestKey
    model: str
    prompt_tokens: int
    max_tokens: int
    session: bytes = b""
    excluded_worker_ids: frozenset[str] = frozenset()
    excluded_boot_ids: frozenset[str] = frozenset()
    block_keys: Sequence[bytes] = ()
    remaining_seconds: float = DEFAULT_REQUEST_SECONDS
    priority: Priority = Priority.DEFAULT
    tenant: bytes = b""
    reject_if_busy: bool = False
    resumed_tokens: int = 0
    computes_prompt: bool = False
    gateway_id: str = ""
    sampling_version: int | None = None

    def excludes(self, worker: WorkerHello) -> bool:
        """True if an earlier attempt failed on this worker or on this boot of it, or if it samples other tokens."""
        address = worker.address
        if address.worker_id in self.excluded_worker_ids or address.boot_id in self.excluded_boot_ids:
            return True
        return self.sampling_version not in (None, worker.sampling_version)
