"""One turn of the engine: commands, then plan -> execute -> settle, then one StepOutput. Knows time, but no threads.

What a step contains is the planner's and the settler's matter, how it is computed the runner's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from typing import Protocol

from weft.engine.batch import Planner, Sampled, Work, report_progress
from weft.engine.config import EngineConfig
from weft.engine.events import Events
from weft.engine.inbox import Command
from weft.engine.messages import EngineLoad, FirstToken, PoolMemory, StepOutput
from weft.engine.sequence import Sequence, State
from weft.engine.settle import Settler
from weft.kv.blocks import BlockPool
from weft.request import RequestKey

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """The part with tensors: owns the pool's bytes, computes and samples."""

    @property
    def pool_memory(self) -> PoolMemory:
        """Where the pool lies."""

    def execute(self, works: Items[Work]) -> list[Sampled]:
        """Compute the KV of every work's tokens; one token for each work that samples, in their order."""


class Loop:
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
        self._planner = Planner(config, self._pool)
        self._settler = Settler(config, self._pool, self._planner)
        self._events = Events()
        self.load = self._measure()

    def turn(self, items: Items[Sequence | Command]) -> bool:
        """Take in what came, run one step if there is work; True when there was none.

        The listener hears of a step, of events, and of a load that is another than before.
        """
        for item in items:
            self._enter(item) if isinstance(item, Sequence) else item()
        works = self._planner.plan(self._events, self._clock())
        if works:
            if self._events:
                self._tell(0.0)  # peers can start on these while the step computes
            self._compute(works)
        elif self._events or self._measure() != self.load:
            self._tell(0.0)
        return not works

    @property
    def num_waiting(self) -> int:
        """Sequences taken in and not admitted."""
        return len(self._planner.waiting)

    @property
    def keys(self) -> list[RequestKey]:
        """All that live."""
        return list(self._planner.live)

    def fill(self, key: RequestKey, num_ready: int, first: FirstToken | None, suspects: tuple[int, ...]) -> None:
        """See `weft.engine.core.Engine.filled`."""
        sequence = self._planner.live.get(key)
        if sequence is None or sequence.state is not State.RESERVED:
            return
        if first is None or sequence.is_prefill:
            num_ready = min(num_ready, sequence.num_prompt - 1)  # the last token must be computed for its logits
        if not self._planner.fill(sequence, num_ready, suspects):
            return
        self._settler.seal(sequence, self._events)
        report_progress(sequence, self._events)
        if first is not None and not sequence.num_pending:
            self._settler.accept(sequence, Sampled(first.token_id, first.logprobs), self._events)

    def cancel(self, key: RequestKey) -> None:
        """See `weft.engine.core.Engine.cancel`."""
        sequence = self._planner.live.get(key)
        if sequence is not None:
            self._planner.remove(sequence)

    def unpin(self, blocks: Iterable[int]) -> None:
        """See `weft.engine.core.Engine.unpin`."""
        self._settler.unpin(blocks)

    def unquarantine(self, blocks: Iterable[int]) -> None:
        """See `weft.engine.core.Engine.unquarantine`."""
        self._pool.unquarantine(blocks)

    def _enter(self, sequence: Sequence) -> None:
        if sequence.spec.key in self._planner.live:
            logger.warning("sequence %s runs already; the second one is dropped", sequence.spec.key)
            return
        self._planner.add(sequence)

    def _compute(self, works: list[Work]) -> None:
        started = self._clock()
        sampled = self._runner.execute(works)
        seconds = self._clock() - started
        self._settler.settle(works, sampled, seconds, self._events)
        self._tell(seconds)

    def _tell(self, seconds: float) -> None:
        self.load = self._measure()
        events, self._events = self._events, Events()
        self._listener(events.output(self.load, seconds))

    def _measure(self) -> EngineLoad:
        planner, counts = self._planner, self._pool.counts()
        computing = [sequence for sequence in planner.live.values() if sequence.state is not State.HELD]
        to_prefill = [each for each in computing if each.state is not State.RESERVED and not each.has_emitted]
        return EngineLoad(
            num_running=len(planner.running),
            num_waiting=len(planner.waiting) + planner.num_reserved,
            queued_prefill_tokens=sum(sequence.num_pending for sequence in to_prefill),
            active_tokens=sum(len(sequence.token_ids) for sequence in planner.live.values()),
            free_blocks=counts.free,
            cached_blocks=counts.cached,
            active_blocks=counts.active,
            quarantined_blocks=counts.quarantined,
            generated_tokens=self._settler.num_generated_tokens,
            computed_prompt_tokens=self._settler.num_computed_prompt_tokens,
        )
