"""Values exchanged with the scheduler and the workers: placements, commands, and the state of the fleet."""

from __future__ import annotations

from dataclasses import dataclass

from weft.fleet_types import LoadingWorker, StoreUsage, WorkerStatus
from weft.request import KEEP, RequestKey, Retention, SamplingParams, WorkerAddress


@dataclass(frozen=True, slots=True)
class Forecast:
    """What the scheduler expects of an attempt, and how long the attempt waited for admission."""

    ttft_ms: int = 0
    itl_ms: int = 0
    cached_tokens: int = 0
    waited_ms: int = 0


@dataclass(frozen=True, slots=True)
class SequencePlacement:
    """The workers of an attempt. Without `prefill` the decode worker computes the prompt."""

    decode: WorkerAddress
    prefill: WorkerAddress | None
    forecast: Forecast


@dataclass(frozen=True, slots=True)
class StartCommand:
    """A sequence to start on a decode worker."""

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
    """A prompt for a prefill worker to embed as the mean hidden state."""

    key: RequestKey
    token_ids: tuple[int, ...]
    cache_salt: bytes
    priority: int


@dataclass(frozen=True, slots=True)
class Settlement:
    """The state of one attempt, for the scheduler.

    `stage` is first_token, finished, failed or cancelled. `generated_tokens` is set with finished.
    """

    key: RequestKey
    stage: str
    failed_worker_id: str = ""
    generated_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class FleetReport:
    """One ListWorkers answer. `store` is None if there is no store or it does not answer."""

    workers: tuple[WorkerStatus, ...] = ()
    store: StoreUsage | None = None
    num_waiting: int = 0
    loading: tuple[LoadingWorker, ...] = ()


@dataclass(frozen=True, slots=True)
class HandOff:
    """A prompt's KV cache that moved from a prefill to a decode worker."""

    prefill_id: str
    decode_id: str
    size_bytes: int
    exposed_ms: int
