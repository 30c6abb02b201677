"""Prompts of which nothing but the mean hidden state is wanted: in and out of the engine. Nothing is lent."""

from __future__ import annotations

import asyncio

from weft.engine.engine import Engine
from weft.engine.messages import SequenceMode, SequenceSpec, StepOutput
from weft.engine.watchdog import StepWatchdog
from weft.errors import InvalidRequest, PeerLost
from weft.request import RequestKey, SamplingParams
from weft.worker.hidden_state_observers import MeanPooling

NO_TEXT = SamplingParams(max_tokens=1, temperature=0)
WATCH_SECONDS = 0.5


class Embedder:
    """Subscribe `on_step` to the engine's feed."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ends: dict[RequestKey, asyncio.Future[None]] = {}
        self._is_open = True

    def close(self) -> None:
        """Take no more."""
        self._is_open = False

    async def until_idle(self) -> None:
        """Every prompt has ended."""
        while self._ends:
            await asyncio.wait(self._ends.values())
            await asyncio.sleep(0)  # whoever waited for it goes first

    def on_step(self, output: StepOutput) -> None:
        """The engine's news; keys that are not embedded here are somebody else's."""
        for delta in output.deltas:
            if (end := self._open(delta.key)) is not None:
                end.set_result(None)
        for failure in output.failures:
            if (end := self._open(failure.key)) is not None:
                end.set_exception(failure.error)

    async def watch(self, watchdog: StepWatchdog) -> None:
        """For ever: when the engine stands still, its prompts are computed elsewhere."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if watchdog.is_hung:
                for key in self._ends:
                    if (end := self._open(key)) is not None:
                        end.set_exception(PeerLost("the prefill engine stands still"))

    async def embed(
        self, key: RequestKey, token_ids: tuple[int, ...], cache_salt: bytes, priority: int
    ) -> tuple[float, ...]:
        """Raises InvalidRequest, Overloaded, PeerLost or EngineFailed. Cancelled, it leaves nothing behind.

        The blocks that it fills can be found by whoever has the salt, as any prompt's.
        """
        if not self._is_open:
            raise PeerLost("the worker is leaving")
        if key in self._ends:
            raise InvalidRequest("this attempt is being computed already")
        reader, mode = MeanPooling(len(token_ids)), SequenceMode.PREFILL
        self._engine.submit(SequenceSpec(key, token_ids, NO_TEXT, mode, cache_salt, priority=priority, observer=reader))
        self._ends[key] = end = asyncio.get_running_loop().create_future()
        try:
            await end
        finally:
            del self._ends[key]
            self._engine.release(key)
        return reader.mean()

    def _open(self, key: RequestKey) -> asyncio.Future[None] | None:
        end = self._ends.get(key)
        return None if end is None or end.done() else end
