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
from weft.engine.sequence import Sequence, State
from weft.kv.blocks import BlockPool, PoolExhausted
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
        size = self._config.block_tokens
        # Matched blocks are shared and were never written to, so they cannot be suspect.
        suspect = set(suspects) & set(sequence.blocks[sequence.num_sealed :])
        if suspect:
            num_ready = min(num_ready, size * min(sequence.blocks.index(block) for block in suspect))
            if not self._replace(sequence, suspect):
                self._requeue(sequence)
                return False
        sequence.num_computed = max(sequence.num_computed, min(num_ready, sequence.num_prompt))
        sequence.num_cached = sequence.num_computed
        self._num_reserved -= 1
        self._run(sequence)
        return True

    def plan(self, events: Events, now: float) -> list[Work]:
        """The next step: one token for everyone who generates, then prompt chunks within `chunk_tokens`."""
        works: list[Work] = []
        num_live = len(self.running)
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

    def _chunks(self, planned: set[Sequence]) -> list[Work]:
        works: list[Work] = []
        budget = self._config.chunk_tokens
        for sequence in self.running:
            if sequence in planned or not budget:
                continue
            work = Work(sequence, min(budget, sequence.num_pending))
            budget -= work.num_tokens
            works.append(work)
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
                events.reserved.append(Reserved(sequence.spec.key, tuple(sequence.blocks), sequence.num_computed))
            else:
                self._run(sequence)
                report_progress(sequence, events)

    def _run(self, sequence: Sequence) -> None:
        sequence.state = State.RUNNING
        self.running.append(sequence)

    def _seat(self, sequence: Sequence) -> bool:
        """Blocks for all its tokens, cached ones first; one more stays free for each sequence that may grow."""
        size = self._config.block_tokens
        hits = self._pool.match(sequence.reusable_keys(size))
        num_growing = self._num_reserved + sum(not other.is_prefill for other in self.running)
        num_new = _blocks_for(sequence, size) - len(hits)
        if num_new + num_growing > self._pool.num_available:
            self._pool.release(hits)
            return False
        sequence.blocks = hits + self._pool.reserve(num_new)
        sequence.num_sealed = len(hits)
        sequence.num_computed = len(hits) * size
        return True

    def _grow(self, sequence: Sequence) -> bool:
        """A block for the next token, at the cost of the youngest; False when that was the sequence itself."""
        num_new = _blocks_for(sequence, self._config.block_tokens) - len(sequence.blocks)
        while num_new > self._pool.num_available:
            victim = next(other for other in reversed(self.running) if not other.is_prefill)
            self._requeue(victim)
            if victim is sequence:
                return False
        sequence.blocks += self._pool.reserve(num_new)
        return True

    def _replace(self, sequence: Sequence, suspect: set[int]) -> bool:
        """Swap the suspect blocks. False: not enough others, and the sequence is left with the good ones alone."""
        self._pool.quarantine(suspect)
        try:
            fresh = iter(self._pool.reserve(len(suspect)))
        except PoolExhausted:
            sequence.blocks = [block for block in sequence.blocks if block not in suspect]
            return False
        sequence.blocks = [next(fresh) if block in suspect else block for block in sequence.blocks]
        return True

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
        self._pool.release(sequence.blocks)
        sequence.blocks = []


def report_progress(sequence: Sequence, events: Events) -> None:
    """For prefill sequences: what a peer may read by now."""
    if sequence.is_prefill and sequence.num_computed:
        num_ready = min(sequence.num_computed, sequence.num_prompt)
        events.progress.append(PromptProgress(sequence.spec.key, tuple(sequence.blocks), num_ready))


def _blocks_for(sequence: Sequence, block_tokens: int) -> int:
    return -(-len(sequence.token_ids) // block_tokens)
