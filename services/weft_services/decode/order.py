"""What a gateway asks for and what it is told, as values; `service.py` puts them on the wire."""

from __future__ import annotations

from dataclasses import dataclass

from weft.request import (
    KEEP,
    FinishReason,
    PositionLogprobs,
    PromptLogprobs,
    PromptUsage,
    RequestKey,
    Retention,
    SamplingParams,
    WorkerAddress,
)


@dataclass(frozen=True, slots=True)
class SequenceOrder:
    """What a gateway asks for. With `num_prompt_logprobs` the prompt is computed here, and there is no `prefill`."""

    key: RequestKey
    decode_boot_id: str
    prefill: WorkerAddress | None
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    remaining_seconds: float
    cache_salt: bytes = b""
    resumed_tokens: int = 0
    priority: int = 0
    traceparent: str = ""
    retention: Retention = KEEP
    num_prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a sequence ended badly; `worker_id` only when a worker is to blame."""

    code: int
    message: str
    worker_id: str


@dataclass(frozen=True, slots=True)
class Delta:
    """One sequence's part of a frame."""

    key: RequestKey
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt: PromptUsage | None = None
    finish_reason: FinishReason | None = None
    failure: Failure | None = None
    prompt_logprobs: PromptLogprobs | None = None
