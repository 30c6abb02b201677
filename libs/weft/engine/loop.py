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

from weft.engine.batch import Planner, Sampled, Work, report_progress
from weft.engine.config import EngineConfig
from weft.engine.inbox import Command
from weft.engine.messages import EngineLoad, FirstToken, PoolMemory, StepOutput
from weft.engine.sequence import Sequence, State
from weft.engine.settle import Settler
from weft.kv.block_pool import BlockPool
from weft.request import RequestKey

logger = logging.getLogger(__name__)


class Launched(Protocol):
    """A step that the device works on."""

    def collect(self) -> list[Sampled]:
        """Wait until it is done; one token for each work that samples, in their order."""


class Runner(Protocol):
    """The part with tensors: owns the pool's bytes, computes and samples."""

    @property
    def pool_memory(self) -> PoolMemory:
        """Where the pool lies."""

    def launch(self, works: Items[Work]) -> Launched:
        """Begin to compute the KV of every work's tokens, after all steps launched before."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step under way."""

    works: Items[Work]
    launched: Launched
    began_at: float


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
        self._events = StepOutput()  # of the step to be told next
        self._under_way: deque[Step] = deque()
        self._settled_at = 0.0
        self.load = self._measure()

    def turn(self, items: Items[Sequence | Command]) -> bool:
        """Take in what came, launch a step if there is work, settle what is due; True when there was neither.

        The listener hears of a step, of events, and of a load that is another than before.
        """
        for item in items:
            self._enter(item) if isinstance(item, Sequence) else item()
        works = self._plan()
        if works:
            if self._events.has_events:
                self._tell(0.0)  # peers can start on these while the step computes
            began_at = self._clock()
            self._under_way.append(Step(works, self._runner.launch(works), began_at))
        is_due = len(self._under_way) > (self._config.steps_ahead if works else 0)
        if is_due:
            self._settle()
        elif not works and (self._events.has_events or self._measure() != self.load):
            self._tell(0.0)
        # what was settled may have made room for somebody
        return not works and not is_due

    def finish(self) -> None:
        """Wait for the device; what comes of it is dropped."""
        while self._under_way:
            self._under_way.popleft().launched.collect()

    @property
    def num_waiting(self) -> int:
        """Sequences taken in and not admitted."""
        return len(self._planner.waiting)

    @property
    def keys(self) -> list[RequestKey]:
        """All that live."""
        return list(self._planner.live)

    def foretell(self, key: RequestKey, first: FirstToken) -> None:
        """See `weft.engine.core.Engine.foretell`."""
        sequence = self._planner.live.get(key)
        if sequence is None or sequence.state is not State.RESERVED or sequence.has_emitted:
            return
        if self._settler.end_with(sequence, first.token_id) is None:
            self._settler.accept(sequence, Sampled(first.token_id, first.logprobs), self._events)

    def fill(self, key: RequestKey, num_ready: int, first: FirstToken | None, suspects: tuple[int, ...]) -> None:
        """See `weft.engine.core.Engine.filled`."""
        sequence = self._planner.live.get(key)
        if sequence is None or sequence.state is not State.RESERVED:
            return
        if sequence.is_prefill or (first is None and not sequence.has_emitted):
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
        self._settler.unpin(blocks, self._events)

    def unquarantine(self, blocks: Iterable[int]) -> None:
        """See `weft.engine.core.Engine.unquarantine`."""
        self._pool.unquarantine(blocks)

    def _enter(self, sequence: Sequence) -> None:
        if sequence.spec.key in self._planner.live:
            logger.warning("sequence %s runs already; the second one is dropped", sequence.spec.key)
            return
        self._planner.add(sequence)

    def _plan(self) -> list[Work]:
        works = self._planner.plan(self._events, self._clock(), is_settled=not self._under_way)
        while works is None:
            self._settle()
            works = self._planner.plan(self._events, self._clock(), is_settled=not self._under_way)
        return works

    def _settle(self) -> None:
        """The oldest step under way."""
        step = self._under_way.popleft()
        sampled = step.launched.collect()
        began_at, self._settled_at = max(step.began_at, self._settled_at), self._clock()
        self._settler.settle(step.works, sampled, self._settled_at - began_at, self._events)
        self._tell(self._settled_at - began_at)

    def _tell(self, seconds: float) -> None:
        self.load = self._measure()
        events, self._events = self._events, StepOutput()
        changes = self._pool.take_changes()
        self._listener(replace(events, load=self.load, step_seconds=seconds, cache_changes=changes))

    def _measure(self) -> EngineLoad:
        planner, counts = self._planner, self._pool.counts()
        return EngineLoad(
            num_running=len(planner.running),
            num_waiting=len(planner.waiting) + planner.num_reserved,
            queued_prefill_tokens=planner.queued_prefill_tokens,
            active_tokens=planner.active_tokens,
            free_blocks=counts.free,
            cached_blocks=counts.cached,
            active_blocks=counts.active,
            quarantined_blocks=counts.quarantined,
            generated_tokens=self._settler.num_generated_tokens,
            computed_prompt_tokens=self._settler.num_computed_prompt_tokens,
        )
