"""What the gateway asks of the scheduler and of decode workers, and what it hears back. Values only; no wire."""

from __future__ import annotations

from dataclasses import dataclass

from weft.request import KEEP, RequestKey, Retention, SamplingParams, WorkerAddress


@dataclass(frozen=True, slots=True)
class RouteQuery:
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
class Placement:
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
class EmbedOrder:
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
