"""What the gateway asks of the scheduler and of decode workers, and what it hears back. Values only; no wire.

The fleet as the scheduler tells it: workers, what each is doing, the shared store. Values only; no wire.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.fleet_types import LoadingWorker, StoreUsage, WorkerStatus
from weft.request import KEEP, RequestKey, Retention, SamplingParams, WorkerAddress


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
