"""Who runs in the next step and with how many tokens: admission, chunks, growth, preemption. Pure bookkeeping.

Knows sequences and block numbers; knows neither tensors nor threads.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass

from weft.engine.burst import burst_step, is_burst
from weft.engine.config import EngineConfig
from weft.engine.messages import PromptProgress, Reserved, StepOutput
from weft.engine.pages import Pages
from weft.engine.sequence import Sequence, State
from weft.engine.waiting import WaitingLine, need
from weft.errors import WeftError
from weft.kv.block_pool import BlockPool
from weft.kv.layer_groups import PageRun
from weft.request import PositionLogprobs, RequestKey


@dataclass(frozen=True, slots=True)
class Work:
    """`num_tokens` tokens of a sequence from position `start` on; `samples`: a new token comes of the last one.

    The first one may be a token that the host does not know yet, as the step before is still to sample it.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool

    @property
    def is_read(self) -> bool:
        """It is a part of a prompt whose hidden states are wanted."""
        return self.sequence.is_read and self.start < self.sequence.num_prompt


@dataclass(frozen=True, slots=True)
class Sampled:
    """A new token, with what was asked for beside it; with a `failure` it is none, and the sequence must end."""

    token_id: int
    logprobs: PositionLogprobs | None = None
    failure: WeftError | None = None


class Planner:
    """Owner of the sequences. `running` is in the order of their turns, as `waiting` is; see `weft.engine.waiting`."""

    def __init__(self, config: EngineConfig, pool: BlockPool) -> None:
        self.live: dict[RequestKey, Sequence] = {}
        self.waiting = WaitingLine()
        self.running: list[Sequence] = []
        self._seated: set[Sequence] = set()  # all who hold blocks
        self._num_reserved = 0
        self._config = config
        self._pool = pool
        self.pages = Pages(config.paging, pool)

    def add(self, sequence: Sequence) -> None:
        """A new sequence."""
        self.live[sequence.spec.key] = sequence
        self.waiting.enter(sequence)

    def remove(self, sequence: Sequence) -> None:
        """The end of a sequence in whatever state; its blocks go back, at once or after the steps under way."""
        self._leave(sequence)
        sequence.state = State.ENDED
        del self.live[sequence.spec.key]
        if not sequence.is_under_way:
            self.pages.release(sequence)

    def arrive(self, work: Work) -> bool:
        """A step is done with this part of it; False when the sequence has ended meanwhile."""
        sequence = work.sequence
        sequence.num_computed += work.num_tokens
        sequence.num_expected -= work.samples
        if sequence.state is not State.ENDED:
            return True
        if not sequence.is_under_way:
            self.pages.release(sequence)
        return False

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
        sequence.set_computed(max(sequence.num_computed, min(num_ready, sequence.num_prompt)))
        self.pages.place(sequence, num_hit)
        sequence.num_cached = sequence.num_computed
        self._num_reserved -= 1
        self._run(sequence)
        return True

    def plan(self, events: StepOutput, now: float, is_settled: bool) -> list[Work] | None:
        """The next step: one token for everyone who generates, then prompt chunks within the budget for that.

        None, when not `is_settled`: the step under way must be settled first, because somebody is to be preempted, or
        has no next token before the last one is known.
        """
        if not is_settled and any(each.num_expected and each.is_shaped_by_its_text for each in self.running):
            return None
        num_running = len(self.running)
        for sequence in list(self.running):
            # An earlier turn of this loop may have preempted it.
            is_next = sequence.state is State.RUNNING and sequence.is_in_its_text
            if is_next and not self._grow(sequence, is_settled):
                return None
        self._catch_up()
        # with somebody preempted, there is no room for others
        has_room = len(self.running) == num_running or not self.running
        if has_room and not self._admit(events, now, is_settled):
            return None
        self._catch_up()  # those who made way may have left more than was wanted
        return self._works(now)

    @property
    def num_reserved(self) -> int:
        """Sequences that wait for somebody else's KV."""
        return self._num_reserved

    @property
    def queued_prefill_tokens(self) -> int:
        """Prompt tokens to be computed here, as far as is known."""
        to_prefill = (sequence for sequence in self.running if not sequence.has_emitted)
        return self.waiting.num_prefill_tokens + sum(sequence.num_pending for sequence in to_prefill)

    @property
    def active_tokens(self) -> int:
        """Of all that live."""
        return self.waiting.num_tokens + sum(len(sequence.token_ids) for sequence in self._seated)

    def _catch_up(self) -> None:
        """Pages that prompts could not get when they last went on come before anybody new."""
        if self._config.paging.is_bounded:
            for sequence in self.running:
                if sequence.is_in_its_prompt:
                    self.pages.slide(sequence)

    def _works(self, now: float) -> list[Work]:
        """From here on the step counts as under way."""
        single = [sequence for sequence in self.running if sequence.is_in_its_text]
        prompts = (sequence for sequence in self.running if sequence.is_in_its_prompt)
        others = sorted(prompts, key=lambda sequence: need(sequence, now), reverse=True)
        if is_burst(self._config, single, others, now):
            rooms = {prompt: self.pages.room(prompt) - prompt.num_launched for prompt in others}
            if works := [self._work(*each, now) for each in burst_step(self._config, rooms)]:
                return works
        works = [self._work(sequence, 1, now) for sequence in single]
        budget, shared = self._config.prompt_budgets(is_mixed=bool(single))
        for sequence in others:
            num_tokens = min(budget, sequence.num_pending, self.pages.room(sequence) - sequence.num_launched)
            if num_tokens > 0:
                budget = min(budget, shared) - num_tokens  # the first prompt waits for those beside it
                works.append(self._work(sequence, num_tokens, now))
        return works

    def _work(self, sequence: Sequence, num_tokens: int, now: float) -> Work:
        work = Work(sequence, sequence.num_launched, num_tokens, num_tokens == sequence.num_pending)
        sequence.num_launched += num_tokens
        if work.samples:
            if not sequence.num_generated:
                sequence.started_at = now
            sequence.expect(self._config.context_tokens)
        return work

    def _admit(self, events: StepOutput, now: float, is_settled: bool) -> bool:
        """Let in who fits, in turn; False when somebody would have to be preempted for that, and may not."""
        while self.waiting:
            sequence = self.waiting.first
            while not self._seat(sequence):
                if (victim := self._yielding(sequence)) is None:
                    return True
                if not is_settled:
                    return False
                self._requeue(victim)
            self.waiting.take(sequence)
            self._seated.add(sequence)
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
        return True

    def _run(self, sequence: Sequence) -> None:
        sequence.state = State.RUNNING
        insort(self.running, sequence, key=lambda other: other.turn)

    def _seat(self, sequence: Sequence) -> bool:
        """Blocks for all its tokens, cached ones first; one more stays free for each sequence that may grow."""
        if len(self.running) + self._num_reserved >= self._config.max_num_seqs:
            return False
        num_hit = self.pages.seat(sequence, self._num_growing)
        if num_hit is None:
            return False
        sequence.num_sealed = num_hit
        sequence.set_computed(num_hit * self._config.block_tokens)
        return True

    @property
    def _num_growing(self) -> int:
        return self._num_reserved + sum(not other.is_prefill for other in self.running)

    def _yielding(self, sequence: Sequence) -> Sequence | None:
        """Who makes way for a sequence of higher priority: the last in turn, if all such together give room enough."""
        lower = [
            other
            for other in self.running
            if not other.is_prefill and other.turn > sequence.turn and other.spec.priority < sequence.spec.priority
        ]
        if not lower:
            return None
        wanted = self.pages.num_wanted(sequence, self._num_growing - len(lower)) - self._pool.num_available
        if sum(len(run.blocks) for other in lower for run in other.runs) < wanted:
            return None  # told without looking at every block, since every step asks
        # blocks that somebody else holds as well stay where they are
        freed = self._pool.num_freed(block for other in lower for run in other.runs for block in run.blocks)
        return lower[-1] if freed >= wanted else None

    def _grow(self, sequence: Sequence, is_settled: bool) -> bool:
        """A block for the next token, at the cost of the last in turn, maybe itself; False when that may not be."""
        num_new = self.pages.num_lacking(sequence)
        while num_new > self._pool.num_available:
            if not is_settled:
                return False
            victim = next(other for other in reversed(self.running) if not other.is_prefill)
            self._requeue(victim)
            if victim is sequence:
                return True
        if num_new:
            self.pages.grow(sequence)
        return True

    def _num_trusted(self, fresh: list[PageRun], suspect: set[int]) -> int:
        """Tokens before the first suspect page; none, where it depends on their number what lies in which page."""
        if self._config.paging.is_bounded:
            return 0
        (run,) = fresh
        return self._config.block_tokens * (run.first + min(map(run.blocks.index, suspect)))

    def _requeue(self, sequence: Sequence) -> None:
        """Preempt: tokens are kept, KV is found in the cache or computed again."""
        self._leave(sequence)
        self.pages.release(sequence)
        sequence.state = State.WAITING
        sequence.set_computed(0)
        sequence.num_sealed = 0
        self.waiting.put_back(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self._seated.discard(sequence)
        if sequence.state is State.WAITING:
            self.waiting.take(sequence)
        elif sequence.state is State.RESERVED:
            self._num_reserved -= 1
        elif sequence.state is State.RUNNING:
            self.running.remove(sequence)


def report_progress(sequence: Sequence, events: StepOutput) -> None:
    """For prefill sequences: what a peer may read by now."""
    if sequence.is_prefill and sequence.num_computed:
        num_ready = min(sequence.num_computed, sequence.num_prompt)
        events.progress.append(PromptProgress(sequence.spec.key, tuple(sequence.runs), num_ready))
