"""Computes embeddings: the mean hidden state of a prompt. No blocks are transferred."""

from __future__ import annotations

import asyncio

from weft.engine.engine import Engine, StepWatchdog
from weft.engine.messages import SequenceMode, SequenceSpec, StepOutput
from weft.errors import InvalidRequest, PeerLost
from weft.request import RequestKey, SamplingParams
from weft.worker.hidden_state_observers import MeanPooling

NO_TEXT = SamplingParams(max_tokens=1, temperature=0)
WATCH_SECONDS = 0.5


class Embedder:
    """Runs prompts for embeddings. Subscribe `on_step` to the engine's events."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ends: dict[RequestKey, asyncio.Future[None]] = {}
        self._is_open = True

    def close(self) -> None:
        """Reject new prompts; running ones continue."""
        self._is_open = False

    async def until_idle(self) -> None:
        """Wait until every prompt has ended."""
        while self._ends:
            await asyncio.wait(self._ends.values())
            await asyncio.sleep(0)  # lets the waiting task finish first

    def on_step(self, output: StepOutput) -> None:
        """Handle engine events; keys of other components are ignored."""
        for delta in output.deltas:
            if (end := self._open(delta.key)) is not None:
                end.set_result(None)
        for failure in output.failures:
            if (end := self._open(failure.key)) is not None:
                end.set_exception(failure.error)

    async def watch(self, watchdog: StepWatchdog) -> None:
        """Fail all prompts when the engine hangs, so that gateways retry elsewhere. Never returns."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if watchdog.is_hung:
                for key in self._ends:
                    if (end := self._open(key)) is not None:
                        end.set_exception(PeerLost("the prefill engine hangs"))

    async def embed(
        self, key: RequestKey, token_ids: tuple[int, ...], cache_salt: bytes, priority: int
    ) -> tuple[float, ...]:
        """Return the mean hidden state. Raises InvalidRequest, Overloaded, PeerLost or EngineFailed.

        Cancelling releases everything. Other requests with the same salt can reuse the filled blocks, as for any
        prompt.
        """
        if not self._is_open:
            raise PeerLost("the worker is shutting down")
        if key in self._ends:
            raise InvalidRequest("this attempt is already running")
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
