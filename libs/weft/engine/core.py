"""The engine's thread: plan -> execute -> settle, commands in from anywhere, one StepOutput a step out.

Knows threads and time. What a step contains is the planner's and the settler's matter, how it is computed the runner's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from functools import partial
from typing import Protocol

from weft.engine.admission import check
from weft.engine.batch import Planner, Sampled, Work, report_progress
from weft.engine.config import EngineConfig
from weft.engine.events import Events
from weft.engine.inbox import Inbox
from weft.engine.messages import EngineLoad, FirstToken, PoolMemory, SequenceFailed, SequenceSpec, StepOutput
from weft.engine.sequence import Sequence, State
from weft.engine.settle import Settler
from weft.errors import Cancelled, EngineFailed, WeftError
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


class Engine:
    """Public methods may be called from any thread and return at once; only `stop` waits, for the step under way.

    `listener` is called on the engine's thread and must not block. Commands about unknown keys change nothing.
    """

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
        self._inbox = Inbox(config.max_waiting)
        self._thread = threading.Thread(target=self._run, name="weft-engine", daemon=True)
        self._load = self._measure()

    def start(self) -> None:
        """Start the thread. Once."""
        self._thread.start()

    def stop(self) -> None:
        """End after the current step and wait for that; sequences still alive fail with Cancelled."""
        self._inbox.close()
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def is_alive(self) -> bool:
        """The thread takes work: not before `start`, not after `stop` or a crash."""
        return self._thread.is_alive() and not self._inbox.is_closed

    @property
    def pool_memory(self) -> PoolMemory:
        """Where the block pool lies in this process."""
        return self._runner.pool_memory

    @property
    def load(self) -> EngineLoad:
        """The load as of the last StepOutput."""
        return self._load

    def submit(self, spec: SequenceSpec) -> None:
        """Run a sequence. Raises InvalidRequest, Overloaded or EngineFailed; then nothing was begun."""
        check(spec, self._config)
        self._inbox.enter(Sequence(spec, list(spec.token_ids), self._clock()))

    def filled(
        self,
        key: RequestKey,
        num_ready_tokens: int,
        first: FirstToken | None = None,
        suspect_blocks: Iterable[int] = (),
    ) -> None:
        """A reserved sequence's first `num_ready_tokens` prompt tokens have their KV; the rest is computed here.

        With the whole prompt ready and its `first` token it goes straight on to generate. `suspect_blocks` may still
        be written by a transfer: they are swapped for others and untouchable until `unquarantine`. To give up a
        sequence whose transfers may be under way, call this with 0 tokens and the blocks in question, then `cancel`.
        """
        self._inbox.post(partial(self._fill, key, num_ready_tokens, first, tuple(suspect_blocks)))

    def cancel(self, key: RequestKey) -> None:
        """End a sequence in whatever state; nothing more is said about it."""
        self._inbox.post(partial(self._cancel, key))

    def release(self, key: RequestKey) -> None:
        """A prefill sequence's blocks have been read; they become cache."""
        self._inbox.post(partial(self._cancel, key))

    def unpin(self, blocks: Iterable[int]) -> None:
        """Blocks of SealedBlocks were copied or declined."""
        self._inbox.post(partial(self._unpin, tuple(blocks)))

    def unquarantine(self, blocks: Iterable[int]) -> None:
        """No transfer touches these suspect blocks any more."""
        self._inbox.post(partial(self._unquarantine, tuple(blocks)))

    def _run(self) -> None:
        error: WeftError = Cancelled("the engine stops")
        try:
            is_idle = True
            while not self._inbox.is_closed:
                is_idle = self._step(self._inbox.take(self._patience() if is_idle else 0))
        except Exception as cause:
            logger.exception("the engine's step failed; every live sequence fails with it")
            error = EngineFailed(f"the engine's step failed: {cause!r}")
        self._end(error)

    def _step(self, items: Items[Sequence | Callable[[Events], None]]) -> bool:
        """One turn; True when there is nothing to do until something comes in."""
        events = Events()
        for item in items:
            self._enter(item) if isinstance(item, Sequence) else item(events)
        swept = self._sweep()
        works = self._planner.plan(events, self._clock())
        if works and events:
            # Peers can start on these while the step computes.
            self._tell(events, 0.0)
            events = Events()
        if works:
            started = self._clock()
            sampled = self._runner.execute(works)
            seconds = self._clock() - started
            self._settler.settle(works, sampled, seconds, events)
            self._tell(events, seconds)
        elif items or swept or events:
            self._tell(events, 0.0)
        return not works

    def _tell(self, events: Events, seconds: float) -> None:
        self._load = self._measure()
        self._inbox.count_waiting(len(self._planner.waiting))
        self._listener(events.output(self._load, seconds))

    def _patience(self) -> float | None:
        overdue_at = self._pool.next_overdue
        return None if overdue_at is None else max(0.0, overdue_at - self._clock())

    def _sweep(self) -> list[int]:
        swept = self._pool.sweep(self._clock())
        if swept:
            logger.warning("blocks left quarantine unasked, %d of them: %s", len(swept), swept[:8])
        return swept

    def _enter(self, sequence: Sequence) -> None:
        if sequence.spec.key in self._planner.live:
            logger.warning("sequence %s runs already; the second one is dropped", sequence.spec.key)
            return
        self._planner.add(sequence)

    def _fill(
        self, key: RequestKey, num_ready: int, first: FirstToken | None, suspects: tuple[int, ...], events: Events
    ) -> None:
        sequence = self._planner.live.get(key)
        if sequence is None or sequence.state is not State.RESERVED:
            return
        if first is None or sequence.is_prefill:
            num_ready = min(num_ready, sequence.num_prompt - 1)  # the last token must be computed for its logits
        overdue_at = self._clock() + self._config.quarantine_seconds
        if not self._planner.fill(sequence, num_ready, suspects, overdue_at):
            return
        self._settler.seal(sequence, events)
        report_progress(sequence, events)
        if first is not None and not sequence.num_pending:
            self._settler.accept(sequence, Sampled(first.token_id, first.logprobs), events)

    def _cancel(self, key: RequestKey, events: Events) -> None:
        sequence = self._planner.live.get(key)
        if sequence is not None:
            self._planner.remove(sequence)

    def _unpin(self, blocks: tuple[int, ...], events: Events) -> None:
        self._settler.unpin(blocks)

    def _unquarantine(self, blocks: tuple[int, ...], events: Events) -> None:
        self._pool.unquarantine(blocks)

    def _end(self, error: WeftError) -> None:
        """Fail all that lives; the books are not touched, they may be what broke."""
        self._inbox.close()
        entering = [item for item in self._inbox.take(0) if isinstance(item, Sequence)]
        keys = [*self._planner.live, *(sequence.spec.key for sequence in entering)]
        failures = [SequenceFailed(key, error) for key in keys]
        if failures:
            self._listener(StepOutput(EngineLoad(), failures=failures))

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
