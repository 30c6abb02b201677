"""One turn of the engine: commands, then plan -> launch -> settle, then one StepOutput. Knows time, but no threads.

With `steps_ahead` 0 a step is settled in the turn that launched it. With 1 it is settled in the next turn, after that
has launched its own: while the device computes one step, the host settles the one before and plans the one after.
What a step contains is the planner's and the settler's matter, how it is computed the runner's.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import Protocol

from weft.engine.command_queue import Command
from weft.engine.config import EngineConfig
from weft.engine.messages import EngineLoad, FirstToken, PoolMemory, StepOutput
from weft.engine.postprocess import Postprocessor
from weft.engine.sequence import Sequence, SequenceState
from weft.engine.step_scheduler import SampledToken, ScheduledChunk, StepScheduler, report_progress
from weft.kv.block_pool import BlockPool
from weft.request import RequestKey

logger = logging.getLogger(__name__)


class StepHandle(Protocol):
    """A step that the device works on."""

    def collect(self) -> list[SampledToken]:
        """Wait until it is done; one token for each work that samples, in their order."""


class Runner(Protocol):
    """The part with tensors: owns the pool's bytes, computes and samples."""

    @property
    def pool_memory(self) -> PoolMemory:
        """Where the pool lies."""

    def launch(self, chunks: Items[ScheduledChunk]) -> StepHandle:
        """Begin to compute the KV of every work's tokens, after all steps launched before."""


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step under way."""

    chunks: Items[ScheduledChunk]
    handle: StepHandle
    launched_at: float


class EngineLoop:
    """Owner of the books and caller of the runner. One thread at a time."""

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        listener: Callable[[StepOutput], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._config = config
        self._listener = listener
        self._clock = clock
        self._pool = BlockPool(config.num_blocks)
        self._scheduler = StepScheduler(config, self._pool)
        self._postprocessor = Postprocessor(config, self._pool, self._scheduler)
        self._events = StepOutput()  # of the step to be told next
        self._in_flight: deque[StepInFlight] = deque()
        self._finished_at = 0.0
        self.load = self._measure()

    def run_step(self, items: Items[Sequence | Command]) -> bool:
        """Take in what came, launch a step if there is work, settle what is due; True when there was neither.

        The listener hears of a step, of events, and of a load that is another than before.
        """
        for item in items:
            self._add(item) if isinstance(item, Sequence) else item()
        chunks = self._schedule()
        if chunks:
            if self._events.has_events:
                self._emit(0.0)  # peers can start on these while the step computes
            began_at = self._clock()
            self._in_flight.append(StepInFlight(chunks, self._runner.launch(chunks), began_at))
        is_due = len(self._in_flight) > (self._config.steps_ahead if chunks else 0)
        if is_due:
            self._finish_step()
        elif not chunks and (self._events.has_events or self._measure() != self.load):
            self._emit(0.0)
        # what was settled may have made room for somebody
        return not chunks and not is_due

    def drain(self) -> None:
        """Wait for the device; what comes of it is dropped."""
        while self._in_flight:
            self._in_flight.popleft().handle.collect()

    @property
    def num_waiting(self) -> int:
        """Sequences taken in and not admitted."""
        return len(self._scheduler.wait_queue)

    @property
    def keys(self) -> list[RequestKey]:
        """All that live."""
        return list(self._scheduler.live)

    def set_first_token(self, key: RequestKey, first: FirstToken) -> None:
        """See `weft.engine.engine.Engine.foretell`."""
        sequence = self._scheduler.live.get(key)
        if sequence is None or sequence.state is not SequenceState.RESERVED or sequence.has_emitted:
            return
        if self._postprocessor.end_with(sequence, first.token_id) is None:
            self._postprocessor.accept(sequence, SampledToken(first.token_id, first.logprobs), self._events)

    def complete_kv(self, key: RequestKey, num_ready: int, first: FirstToken | None, suspects: tuple[int, ...]) -> None:
        """See `weft.engine.engine.Engine.filled`."""
        sequence = self._scheduler.live.get(key)
        if sequence is None or sequence.state is not SequenceState.RESERVED:
            return
        if sequence.is_prefill or (first is None and not sequence.has_emitted):
            num_ready = min(num_ready, sequence.num_prompt - 1)  # the last token must be computed for its logits
        if not self._scheduler.complete_kv(sequence, num_ready, suspects):
            return
        self._postprocessor.seal(sequence, self._events)
        report_progress(sequence, self._events)
        if first is not None and not sequence.num_pending:
            self._postprocessor.accept(sequence, SampledToken(first.token_id, first.logprobs), self._events)

    def cancel(self, key: RequestKey) -> None:
        """See `weft.engine.engine.Engine.cancel`."""
        sequence = self._scheduler.live.get(key)
        if sequence is not None:
            self._scheduler.remove(sequence)

    def unpin(self, blocks: Iterable[int]) -> None:
        """See `weft.engine.engine.Engine.unpin`."""
        self._postprocessor.unpin(blocks, self._events)

    def unquarantine(self, blocks: Iterable[int]) -> None:
        """See `weft.engine.engine.Engine.unquarantine`."""
        self._pool.unquarantine(blocks)

    def _add(self, sequence: Sequence) -> None:
        if sequence.spec.key in self._scheduler.live:
            logger.warning("sequence %s runs already; the second one is dropped", sequence.spec.key)
            return
        self._scheduler.add(sequence)

    def _schedule(self) -> list[ScheduledChunk]:
        chunks = self._scheduler.schedule(self._events, self._clock(), is_settled=not self._in_flight)
        while chunks is None:
            self._finish_step()
            chunks = self._scheduler.schedule(self._events, self._clock(), is_settled=not self._in_flight)
        return chunks

    def _finish_step(self) -> None:
        """The oldest step under way."""
        step = self._in_flight.popleft()
        sampled = step.handle.collect()
        began_at, self._finished_at = max(step.launched_at, self._finished_at), self._clock()
        self._postprocessor.apply(step.chunks, sampled, self._finished_at - began_at, self._events)
        self._emit(self._finished_at - began_at)

    def _emit(self, seconds: float) -> None:
        self.load = self._measure()
        events, self._events = self._events, StepOutput()
        changes = self._pool.take_changes()
        self._listener(replace(events, load=self.load, step_seconds=seconds, cache_changes=changes))

    def _measure(self) -> EngineLoad:
        planner, counts = self._scheduler, self._pool.counts()
        return EngineLoad(
            num_running=len(planner.running),
            num_waiting=len(planner.wait_queue) + planner.num_reserved,
            queued_prefill_tokens=planner.queued_prefill_tokens,
            active_tokens=planner.active_tokens,
            free_blocks=counts.free,
            cached_blocks=counts.cached,
            active_blocks=counts.active,
            quarantined_blocks=counts.quarantined,
            generated_tokens=self._postprocessor.num_generated_tokens,
            computed_prompt_tokens=self._postprocessor.num_computed_prompt_tokens,
        )
