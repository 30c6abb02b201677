"""Who runs in the next step and with how many tokens: admission, chunks, growth, preemption. Pure bookkeeping.

Knows sequences and block numbers; knows neither tensors nor threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from weft.engine.config import EngineConfig
from weft.engine.events import Events
from weft.engine.messages import PromptProgress, Reserved
from weft.engine.pages import Pages
from weft.engine.sequence import Sequence, State
from weft.kv.blocks import BlockPool
from weft.kv.groups import PageRun
from weft.request import PositionLogprobs, RequestKey


@dataclass(frozen=True, slots=True)
class Work:
    """The next `num_tokens` tokens of a sequence; `samples` when they are its last ones."""

    sequence: Sequence
    num_tokens: int

    @property
    def samples(self) -> bool:
        """A new token comes of it."""
        return self.num_tokens == self.sequence.num_pending


@dataclass(frozen=True, slots=True)
class Sampled:
    """A new token, with logprobs when asked for; with a `failure` it is none, and the sequence must end."""

    token_id: int
    logprobs: PositionLogprobs | None = None
    failure: str | None = None


class Planner:
    """Owner of the sequences. `running` is in order of admission, the youngest last; `waiting` is first come first."""

    def __init__(self, config: EngineConfig, pool: BlockPool) -> None:
        self.live: dict[RequestKey, Sequence] = {}
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._num_reserved = 0
        self._config = config
        self._pool = pool
        self.pages = Pages(config.paging, pool)

    def add(self, sequence: Sequence) -> None:
        """A new sequence, at the end of the queue."""
        self.live[sequence.spec.key] = sequence
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """The end of a sequence in whatever state; its blocks go back."""
        self._leave(sequence)
        del self.live[sequence.spec.key]

    def hold(self, sequence: Sequence) -> None:
        """A prefill is complete: it computes no more, and keeps its blocks."""
        self.running.remove(sequence)
        sequence.state = State.HELD

    def fill(self, sequence: Sequence, num_ready: int, suspects: Iterable[int]) -> bool:
        """Somebody else wrote the first `num_ready` prompt tokens of a reserved sequence: it may run now.

        Suspect blocks go to quarantine and new ones take their place; False when there are none: it queues again.
        """
        assert sequence.state is State.RESERVED
        sequence.is_filled = True
        num_hit = sequence.num_sealed
        # Matched blocks are shared and were never written to, so they cannot be suspect.
        fresh = [run.within(num_hit, run.end) for run in sequence.runs]
        suspect = set(suspects).intersection(block for run in fresh for block in run.blocks)
        if suspect:
            num_ready = min(num_ready, self._num_trusted(fresh, suspect))
            if not self.pages.replace(sequence, suspect):
                self._requeue(sequence)
                return False
        sequence.num_computed = max(sequence.num_computed, min(num_ready, sequence.num_prompt))
        self.pages.place(sequence, num_hit)
        sequence.num_cached = sequence.num_computed
        self._num_reserved -= 1
        self._run(sequence)
        return True

    def plan(self, events: Events, now: float) -> list[Work]:
        """The next step: one token for everyone who generates, then prompt chunks within `chunk_tokens`."""
        works: list[Work] = []
        num_live = len(self.running)
        self._catch_up()
        for sequence in list(self.running):
            # An earlier turn of this loop may have preempted it.
            if sequence.state is State.RUNNING and sequence.num_pending == 1 and self._grow(sequence):
                works.append(Work(sequence, 1))
        if len(self.running) == num_live or not works:  # with somebody preempted, there is no room for others
            self._admit(events, now)
        return works + self._chunks({work.sequence for work in works})

    @property
    def num_reserved(self) -> int:
        """Sequences that wait for somebody else's KV."""
        return self._num_reserved

    def _catch_up(self) -> None:
        """Pages that prompts could not get when they last went on come before anybody new."""
        if self._config.paging.is_bounded:
            for sequence in self.running:
                self.pages.slide(sequence)

    def _chunks(self, planned: set[Sequence]) -> list[Work]:
        works: list[Work] = []
        budget = self._config.chunk_tokens
        for sequence in self.running:
            if sequence in planned:
                continue
            num_tokens = min(budget, sequence.num_pending, self.pages.room(sequence) - sequence.num_computed)
            if num_tokens:
                budget -= num_tokens
                works.append(Work(sequence, num_tokens))
        return works

    def _admit(self, events: Events, now: float) -> None:
        while self.waiting and len(self.running) + self._num_reserved < self._config.max_num_seqs:
            sequence = self.waiting[0]
            if not self._seat(sequence):
                return
            self.waiting.popleft()
            if sequence.admitted_at is None:
                sequence.admitted_at = now
                sequence.num_cached = sequence.num_computed
            elif not sequence.has_emitted:
                sequence.num_cached = min(sequence.num_cached, sequence.num_computed)  # its own blocks are no hit
            if sequence.spec.wait_for_kv and not sequence.is_filled:
                sequence.state = State.RESERVED
                self._num_reserved += 1
                events.reserved.append(Reserved(sequence.spec.key, tuple(sequence.runs), sequence.num_computed))
            else:
                self._run(sequence)
                report_progress(sequence, events)

    def _run(self, sequence: Sequence) -> None:
        sequence.state = State.RUNNING
        self.running.append(sequence)

    def _seat(self, sequence: Sequence) -> bool:
        """Blocks for all its tokens, cached ones first; one more stays free for each sequence that may grow."""
        num_growing = self._num_reserved + sum(not other.is_prefill for other in self.running)
        num_hit = self.pages.seat(sequence, num_growing)
        if num_hit is None:
            return False
        sequence.num_sealed = num_hit
        sequence.num_computed = num_hit * self._config.block_tokens
        return True

    def _grow(self, sequence: Sequence) -> bool:
        """A block for the next token, at the cost of the youngest; False when that was the sequence itself."""
        num_tokens = len(sequence.token_ids)
        num_new = self.pages.num_lacking(sequence, num_tokens)
        while num_new > self._pool.num_available:
            victim = next(other for other in reversed(self.running) if not other.is_prefill)
            self._requeue(victim)
            if victim is sequence:
                return False
        if num_new:
            self.pages.grow(sequence, num_tokens)
        return True

    def _num_trusted(self, fresh: list[PageRun], suspect: set[int]) -> int:
        """Tokens before the first suspect page; none, where it depends on their number what lies in which page."""
        if self._config.paging.is_bounded:
            return 0
        (run,) = fresh
        return self._config.block_tokens * (run.first + min(map(run.blocks.index, suspect)))

    def _requeue(self, sequence: Sequence) -> None:
        """Preempt: tokens are kept, KV is found in the cache or computed again. It goes before all who never ran."""
        self._leave(sequence)
        sequence.state = State.WAITING
        sequence.num_computed = 0
        sequence.num_sealed = 0
        self.waiting.appendleft(sequence)

    def _leave(self, sequence: Sequence) -> None:
        if sequence.state is State.WAITING:
            self.waiting.remove(sequence)
        elif sequence.state is State.RESERVED:
            self._num_reserved -= 1
        elif sequence.state is State.RUNNING:
            self.running.remove(sequence)
        self.pages.release(sequence)


def report_progress(sequence: Sequence, events: Events) -> None:
    """For prefill sequences: what a peer may read by now."""
    if sequence.is_prefill and sequence.num_computed:
        num_ready = min(sequence.num_computed, sequence.num_prompt)
        events.progress.append(PromptProgress(sequence.spec.key, tuple(sequence.runs), num_ready))
