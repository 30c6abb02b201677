"""What decode workers send back for one client request: deltas of all its sequences, in a bounded inbox."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from weft.errors import Overloaded, WeftError
from weft.request import FinishReason, PositionLogprobs, PromptUsage, RequestKey

MAX_DELTAS = 4096


@dataclass(frozen=True, slots=True)
class Delta:
    """One sequence's part of an engine step. `worker_id` names who is at fault when there is an error."""

    key: RequestKey
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt: PromptUsage | None = None
    finish_reason: FinishReason | None = None
    error: WeftError | None = None
    worker_id: str = ""


class Inbox:
    """Filled by the Attach streams, emptied by the request's one task. A reader that is too slow loses the request.

    `on_overflow` is called when that has happened: the reader may not come back for long.
    """

    def __init__(self, on_overflow: Callable[[], None] = lambda: None, max_deltas: int = MAX_DELTAS) -> None:
        self._on_overflow = on_overflow
        self._deltas: deque[Delta] = deque()
        self._max_deltas = max_deltas
        self._filled = asyncio.Event()
        self._overflowed = False

    def put(self, delta: Delta) -> None:
        """Never blocks; beyond the bound the delta is dropped and the next `take` raises."""
        if len(self._deltas) < self._max_deltas:
            self._deltas.append(delta)
        elif not self._overflowed:
            self._overflowed = True
            self._on_overflow()
        self._filled.set()

    def wake(self) -> None:
        """Let `take` return although there is nothing: something else has changed."""
        self._filled.set()

    async def take(self) -> list[Delta]:
        """Everything that has arrived; nothing after `wake`. Raises Overloaded when the bound was passed."""
        await self._filled.wait()
        self._filled.clear()
        if self._overflowed:
            raise Overloaded("the client reads its answer too slowly")
        taken = list(self._deltas)
        self._deltas.clear()
        return taken
