"""Prompts of which nothing but the mean hidden state is wanted: in and out of the engine. Nothing is lent."""

from __future__ import annotations

import asyncio

from weft.engine.core import Engine
from weft.engine.messages import SequenceMode, SequenceSpec, StepOutput
from weft.errors import InvalidRequest
from weft.request import RequestKey, SamplingParams

NO_TEXT = SamplingParams(max_tokens=1, temperature=0)


def embedding_spec(key: RequestKey, token_ids: tuple[int, ...], cache_salt: bytes, priority: int) -> SequenceSpec:
    """What the engine is asked. The blocks it fills can be found by whoever has the salt, as any prompt's."""
    return SequenceSpec(key, token_ids, NO_TEXT, SequenceMode.PREFILL, cache_salt, priority=priority, pools=True)


class Embedder:
    """Subscribe `on_step` to the engine's feed."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._results: dict[RequestKey, asyncio.Future[tuple[float, ...]]] = {}

    def on_step(self, output: StepOutput) -> None:
        """The engine's news; keys that are not embedded here are somebody else's."""
        for delta in output.deltas:
            if (result := self._open(delta.key)) is not None and delta.mean_hidden is not None:
                result.set_result(delta.mean_hidden)
        for failure in output.failures:
            if (result := self._open(failure.key)) is not None:
                result.set_exception(failure.error)

    async def embed(self, spec: SequenceSpec) -> tuple[float, ...]:
        """Raises InvalidRequest, Overloaded or EngineFailed. Cancelled, it leaves nothing behind."""
        key = spec.key
        if key in self._results:
            raise InvalidRequest("this attempt is being computed already")
        self._engine.submit(spec)
        result: asyncio.Future[tuple[float, ...]] = asyncio.get_running_loop().create_future()
        self._results[key] = result
        try:
            return await result
        finally:
            del self._results[key]
            self._engine.release(key)

    def _open(self, key: RequestKey) -> asyncio.Future[tuple[float, ...]] | None:
        result = self._results.get(key)
        return None if result is None or result.done() else result
