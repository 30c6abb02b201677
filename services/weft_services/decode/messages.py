"""Values exchanged with gateways, which `service.py` encodes, and the bounded queue of frames."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Generic, TypeVar

from weft.errors import Overloaded
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

ItemT = TypeVar("ItemT")


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """A gateway's request. With `num_prompt_logprobs` the prompt is computed here and `prefill` must be None."""

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
class SequenceFailure:
    """Why a sequence failed; `worker_id` is set only if a worker is at fault."""

    code: int
    message: str
    worker_id: str


@dataclass(frozen=True, slots=True)
class DecodeUpdate:
    """One sequence's part of a frame."""

    key: RequestKey
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt: PromptUsage | None = None
    finish_reason: FinishReason | None = None
    failure: SequenceFailure | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Outbox(Generic[ItemT]):
    """Frames for one gateway. `put` never waits; `until_overflow` raises once the gateway reads too slowly."""

    def __init__(self, max_frames: int) -> None:
        self._frames: asyncio.Queue[list[ItemT]] = asyncio.Queue(max_frames)
        self._has_overflown = asyncio.Event()

    def put(self, frame: list[ItemT]) -> None:
        """Append a frame, or drop it if the queue is full."""
        try:
            self._frames.put_nowait(frame)
        except asyncio.QueueFull:
            self._has_overflown.set()

    async def get(self) -> list[ItemT]:
        return await self._frames.get()

    async def until_overflow(self) -> None:
        """Raise Overloaded when a frame was dropped; never returns."""
        await self._has_overflown.wait()
        raise Overloaded("the gateway reads its stream too slowly")
