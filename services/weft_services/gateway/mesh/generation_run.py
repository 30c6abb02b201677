"""One client request on the mesh: runs its sequences, merges their updates into one stream, and cleans up.

Only this module and `sequence_runner` retry, because only they know what the client has received.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from weft.errors import DeadlineExceeded, WeftError
from weft.ids import new_id
from weft.request import PromptUsage
from weft.request_stage import RequestStage
from weft.rpc.status import as_weft_error
from weft_services.gateway.mesh.decode_connection import DELTAS_PER_SEQUENCE, MAX_DELTAS, SequenceUpdate, UpdateQueue
from weft_services.gateway.mesh.prepare import PreparedRequest
from weft_services.gateway.mesh.routing_hints import RoutingHints
from weft_services.gateway.mesh.scheduler_types import Forecast
from weft_services.gateway.mesh.sequence_runner import (
    ChoiceText,
    ChoiceUpdate,
    MeshContext,
    RequestContext,
    SequenceRunner,
)
from weft_services.gateway.text.codec import Codec


class GenerationRun:
    """Use as `async with GenerationRun(...) as run:`, then await `run.next()` until None. Leaving early cancels."""

    def __init__(
        self, mesh: MeshContext, prepared: PreparedRequest, codec: Codec, hints: RoutingHints, deadline: float
    ) -> None:
        """`deadline` is in event-loop time."""
        self.prepared = prepared
        max_deltas = max(MAX_DELTAS, DELTAS_PER_SEQUENCE * len(prepared.sequences))
        self._shared = RequestContext(prepared, hints, deadline, UpdateQueue(self._cancel, max_deltas))
        self._failure: WeftError | None = None  # raised after the updates before it are delivered
        self._runners = [
            SequenceRunner(
                mesh,
                self._shared,
                new_id(),
                ChoiceText(index, codec, prepared.stops(index), spec.max_tokens, prepared.prompts[spec.prompt].context),
            )
            for index, spec in enumerate(prepared.sequences)
        ]
        self._num_open = len(self._runners)
        self._by_id = {runner.key.request_id: runner for runner in self._runners}

    async def __aenter__(self) -> Self:
        try:
            await self._place()
        except BaseException as error:
            self._cancel()
            if isinstance(error, BaseExceptionGroup):
                raise as_weft_error(error) from error
            raise
        return self

    async def _place(self) -> None:
        if len(self._runners) == 1:
            await self._runners[0].place()
            return
        async with asyncio.TaskGroup() as group:
            for runner in self._runners:
                group.create_task(runner.place())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cancel()

    @property
    def request_id(self) -> str:
        """The first sequence's id in the mesh, as it appears in the workers' logs."""
        return self._runners[0].key.request_id

    @property
    def num_attempts(self) -> int:
        """Starts on workers over all sequences; more than the number of sequences means migrations."""
        return sum(runner.num_attempts for runner in self._runners)

    @property
    def num_completion_tokens(self) -> int:
        """Tokens generated so far, end tokens included."""
        return sum(len(runner.choice.token_ids) for runner in self._runners)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that prefill took from the cache.

        Each prompt counts once. Of several choices that continue one prompt, the one with the fewest cached tokens
        counts.
        """
        cached = [len(prompt.token_ids) for prompt in self.prepared.prompts]
        for runner, spec in zip(self._runners, self.prepared.sequences, strict=True):
            count = runner.usage.cached_tokens if runner.usage else 0
            cached[spec.prompt] = min(cached[spec.prompt], count)
        return sum(cached)

    @property
    def finish_reasons(self) -> list[str]:
        """Finish reasons of the choices that have ended."""
        return [str(runner.choice.finish_reason) for runner in self._runners if runner.is_done]

    @property
    def decode_id(self) -> str:
        """The decode worker of the first sequence; empty before its first start."""
        return self._runners[0].decode_id

    @property
    def worst_prompt(self) -> PromptUsage:
        """Usage of the prompt that took longest, for the access log."""
        usages = [runner.usage for runner in self._runners if runner.usage is not None]
        return max(usages, key=lambda usage: usage.queue_ms + usage.compute_ms, default=PromptUsage())

    @property
    def forecast(self) -> Forecast | None:
        """The scheduler's forecast for the sequence with the longest expected TTFT, at its first placement."""
        forecasts = [runner.forecast for runner in self._runners if runner.forecast is not None]
        return max(forecasts, key=lambda forecast: forecast.ttft_ms, default=None)

    async def next(self, idle_seconds: float) -> list[ChoiceUpdate] | None:
        """Return what has arrived, one update per choice.

        The list is empty after `idle_seconds` without updates; None means the end. Raises WeftError when a sequence has
        failed for good, DeadlineExceeded when the deadline has passed.
        """
        loop, updates = asyncio.get_running_loop(), self._shared.updates
        until = min(loop.time() + idle_seconds, self._shared.deadline)
        while self._failure is None and self._num_open:
            if pieces := self._accept(await updates.wait(until)):
                return pieces
            now = loop.time()
            if now >= self._shared.deadline:
                raise DeadlineExceeded("the request took too long")
            if now >= until:
                return []
        if self._failure is not None:
            raise self._failure
        return None

    def _accept(self, deltas: list[SequenceUpdate]) -> list[ChoiceUpdate]:
        grouped: dict[str, list[SequenceUpdate]] = {}
        broken: dict[str, SequenceUpdate] = {}
        for delta in deltas:
            request_id = delta.key.request_id
            runner = self._by_id.get(request_id)
            is_late = runner is None or runner.is_done or (delta.key is not runner.key and delta.key != runner.key)
            if is_late or request_id in broken:
                continue  # from an earlier attempt
            if delta.error is not None:
                broken[request_id] = delta
            else:
                grouped.setdefault(request_id, []).append(delta)
        advanced = [self._advance(self._by_id[request_id], batch) for request_id, batch in grouped.items()]
        # Updates with prompt logprobs only are held back until the first token.
        pieces = [piece for piece in advanced if piece.token_ids or piece.finish_reason is not None]
        for runner in self._runners:
            self._failure = self._failure or runner.failure
        for request_id, delta in broken.items():
            runner = self._by_id[request_id]
            if delta.error is None or runner.is_done:
                continue
            try:
                runner.migrate(delta.error, delta.worker_id)
            except WeftError as error:
                self._failure = error
        return pieces

    def _advance(self, runner: SequenceRunner, deltas: list[SequenceUpdate]) -> ChoiceUpdate:
        piece = runner.choice.accept(deltas)
        if piece.token_ids or piece.finish_reason is not None:
            usage = None
            for delta in deltas:
                usage = usage or delta.prompt
            runner.on_tokens(usage)
        if runner.is_done:
            self._num_open -= 1
            engine_has_ended = deltas[-1].finish_reason is not None
            runner.end(RequestStage.FINISHED, cancel=not engine_has_ended)
        return piece

    def _cancel(self) -> None:
        self._shared.updates.close()
        for runner in self._runners:
            runner.cancel()
