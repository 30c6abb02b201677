"""What a gateway asks for and what it is told, as values; `service.py` puts them on the wire.

Frames on their way to one gateway, never more than a bound: a gateway that reads too slowly is cut off.
"""

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


@dataclass(frozen=True, slots=True)
class SequenceRequest:
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
class SequenceFailure:
    """Why a sequence ended badly; `worker_id` only when a worker is to blame."""

    code: int
    message: str
    worker_id: str


@dataclass(frozen=True, slots=True)
class SequenceUpdate:
    """One sequence's part of a frame."""

    key: RequestKey
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt: PromptUsage | None = None
    finish_reason: FinishReason | None = None
    failure: SequenceFailure | None = None
    prompt_logprobs: PromptLogprobs | None = None


ItemT = TypeVar("ItemT")


class Outbox(Generic[ItemT]):
    """`put` never waits; `until_overflow` tells the owner that the reader has fallen behind for good."""

    def __init__(self, max_frames: int) -> None:
        self._frames: asyncio.Queue[list[ItemT]] = asyncio.Queue(max_frames)
        self._has_overflown = asyncio.Event()

    def put(self, frame: list[ItemT]) -> None:
        """Behind the others; thrown away once there are too many."""
        try:
            self._frames.put_nowait(frame)
        except asyncio.QueueFull:
            self._has_overflown.set()

    async def get(self) -> list[ItemT]:
        """The next frame."""
        return await self._frames.get()

    async def until_overflow(self) -> None:
        """Raises Overloaded when a frame was thrown away; never returns."""
        await self._has_overflown.wait()
        raise Overloaded("the gateway reads its stream too slowly")
