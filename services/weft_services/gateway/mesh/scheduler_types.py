"""What the gateway asks of the scheduler and of decode workers, and what it hears back. Values only; no wire.

The fleet as the scheduler tells it: workers, what each is doing, the shared store. Values only; no wire.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.request import KEEP, RequestKey, Retention, SamplingParams, WorkerAddress, WorkerRole
from weft.worker_stats import NO_STATS, WorkerStats


@dataclass(frozen=True, slots=True)
class PlacementQuery:
    """What routing needs to know of one attempt. `priority` as engines count: higher goes first;
    `num_resumed_tokens` of the prompt's are what earlier attempts generated; `computes_prompt`: whoever decodes has to
    compute all of it."""

    key: RequestKey
    model: str
    num_prompt_tokens: int
    max_tokens: int
    session: bytes
    block_keys: tuple[bytes, ...]
    excluded_boot_ids: tuple[str, ...] = ()
    tenant: bytes = b""
    priority: int = 0
    reject_if_busy: bool = False
    num_resumed_tokens: int = 0
    computes_prompt: bool = False


@dataclass(frozen=True, slots=True)
class Forecast:
    """What the scheduler expects of an attempt, and how long it had to wait for a place."""

    ttft_ms: int = 0
    itl_ms: int = 0
    cached_tokens: int = 0
    waited_ms: int = 0


@dataclass(frozen=True, slots=True)
class SequencePlacement:
    """Where an attempt goes; without `prefill` the decode worker computes the prompt."""

    decode: WorkerAddress
    prefill: WorkerAddress | None
    forecast: Forecast


@dataclass(frozen=True, slots=True)
class StartCommand:
    """A sequence to run on a decode worker, whichever that will be."""

    key: RequestKey
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: bytes
    resumed_tokens: int = 0
    priority: int = 0
    retention: Retention = KEEP
    num_prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class EmbedCommand:
    """A prompt of which a prefill worker is to give the mean hidden state."""

    key: RequestKey
    token_ids: tuple[int, ...]
    cache_salt: bytes
    priority: int


@dataclass(frozen=True, slots=True)
class Settlement:
    """How far one attempt has come. `stage` is first_token, finished, failed or cancelled; with finished the attempt's
    tokens are said."""

    key: RequestKey
    stage: str
    failed_worker_id: str = ""
    generated_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What a worker last said of itself, and what the scheduler has booked on it. Blocks add up to the pool."""

    num_blocks: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    active_blocks: int = 0
    quarantined_blocks: int = 0
    num_running: int = 0
    num_waiting: int = 0
    queued_prefill_tokens: int = 0
    active_tokens: int = 0
    generated_tokens: int = 0
    computed_prompt_tokens: int = 0
    booked_tokens: int = 0
    report_age_ms: int = 0
    tallies: WorkerStats = NO_STATS


NO_LOAD = WorkerLoad()


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One line of the fleet's list."""

    address: WorkerAddress
    role: WorkerRole
    model: str
    is_ready: bool
    block_tokens: int
    max_context_tokens: int
    weights_hash: str
    is_draining: bool = False
    is_parked: bool = False
    can_change_role: bool = False
    transport: str = ""
    load: WorkerLoad = NO_LOAD
    is_full: bool = False

    @property
    def serves(self) -> bool:
        """It takes requests, or would if sequences did not hold its whole pool: then they wait, and it is there."""
        return self.is_ready or self.is_full


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """Memory and disk of the shared store, and what blocks take of them."""

    memory_bytes: int
    memory_used_bytes: int
    disk_bytes: int
    disk_used_bytes: int


@dataclass(frozen=True, slots=True)
class LoadingWorker:
    """A worker that loads its model and has not joined. `total_bytes` 0: what it does is not counted in bytes."""

    worker_id: str
    role: WorkerRole
    model: str
    phase: str
    done_bytes: int = 0
    total_bytes: int = 0
    since_ms: int = 0


@dataclass(frozen=True, slots=True)
class FleetReport:
    """One answer of the scheduler. `store` None: there is none, or it does not answer."""

    workers: tuple[WorkerStatus, ...] = ()
    store: StoreUsage | None = None
    num_waiting: int = 0
    loading: tuple[LoadingWorker, ...] = ()


@dataclass(frozen=True, slots=True)
class HandOff:
    """A prompt that this gateway has just seen handed from one worker to another."""

    prefill_id: str
    decode_id: str
    size_bytes: int
    exposed_ms: int
