"""What decode workers send back for one client request: deltas of all its sequences, in a bounded inbox."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

from weft.errors import Overloaded, WeftError
from weft.request import FinishReason, PositionLogprobs, PromptLogprobs, PromptUsage, RequestKey

# of a request of few sequences, and of each of many: nobody reads while the last of them wait for their places
MAX_DELTAS, DELTAS_A_SEQUENCE = 4096, 512


@dataclass(slots=True)  # not frozen: there is one a token, and a frozen one takes three times as long to make
class Delta:
    """One sequence's part of an engine step. `worker_id` names who is at fault when there is an error."""

    key: RequestKey
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt: PromptUsage | None = None
    finish_reason: FinishReason | None = None
    error: WeftError | None = None
    worker_id: str = ""
    prompt_logprobs: PromptLogprobs | None = None


class Inbox:
    """Filled by the Attach streams, emptied by the request's one task. A reader that is too slow loses the request.

    `on_overflow` is called when that has happened: the reader may not come back for long.
    """

    def __init__(self, on_overflow: Callable[[], None] = lambda: None, max_deltas: int = MAX_DELTAS) -> None:
        self._on_overflow = on_overflow
        self._deltas: list[Delta] = []
        self._max_deltas = max_deltas
        self._has_news = False
        self._overflowed = False
        self._reader: asyncio.Future[None] | None = None
        self._until = math.inf
        self._timer: asyncio.TimerHandle | None = None

    def put(self, delta: Delta) -> None:
        """Never blocks; beyond the bound the delta is dropped and the next `take` raises. Wakes nobody who waits."""
        self._has_news = True
        if len(self._deltas) < self._max_deltas:
            self._deltas.append(delta)
        elif not self._overflowed:
            self._overflowed = True
            self._on_overflow()

    def wake(self) -> None:
        """Let `take` return, also where there is nothing: something else has changed."""
        self._has_news = True
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def take(self, until: float = math.inf) -> list[Delta]:
        """Everything that has arrived; nothing after `wake`, and when it is `until` in the loop's time.

        Raises Overloaded when the bound was passed.
        """
        if not self._has_news:
            self._watch_clock(until)
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        self._has_news = False
        if self._overflowed:
            raise Overloaded("the client reads its answer too slowly")
        taken, self._deltas = self._deltas, []
        return taken

    def close(self) -> None:
        """Nobody will take from it any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _watch_clock(self, until: float) -> None:
        """Nearly every wait ends long before its time: a timer that is set stays, and looks again when it goes off."""
        is_sooner = until < self._until
        self._until = until
        if self._timer is not None and is_sooner:
            self.close()
        if self._timer is None and until < math.inf:
            self._timer = asyncio.get_running_loop().call_at(until, self._ring)

    def _ring(self) -> None:
        self._timer = None
        if asyncio.get_running_loop().time() < self._until:
            self._watch_clock(self._until)
        else:
            self.wake()
