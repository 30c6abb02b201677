"""Who runs in the next step and with how many tokens: admission, chunks, growth, preemption. Pure bookkeeping.

Knows sequences and block numbers; knows neither tensors nor threads.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass

from weft.engine.block_tables import BlockTables
from weft.engine.config import EngineConfig
from weft.engine.messages import PromptProgress, Reserved, StepOutput
from weft.engine.prefill_order import burst_step, is_burst, prefill_priority
from weft.engine.sequence import Sequence, SequenceState
from weft.engine.wait_queue import WaitQueue
from weft.errors import WeftError
from weft.kv.block_pool import BlockPool
from weft.kv.layer_groups import PageRange
from weft.request import PositionLogprobs, RequestKey


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """`num_tokens` tokens of a sequence from position `start` on; `samples`: a new token comes of the last one.

    The first one may be a token that the host does not know yet, as the step before is still to sample it.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    has_sample: bool

    @property
    def has_observer(self) -> bool:
        """It is a part of a prompt whose hidden states are wanted."""
        return self.sequence.has_observer and self.start < self.sequence.num_prompt


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A new token, with what was asked for beside it; with a `failure` it is none, and the sequence must end."""

    token_id: int
    logprobs: PositionLogprobs | None = None
    failure: WeftError | None = None


class StepScheduler:
    """Owns all sequences. `running` is sorted by queue key, like the wait queue; see `weft.engine.wait_queue`."""

    def __init__(self, config: EngineConfig, pool: BlockPool) -> None:
        self.live: dict[RequestKey, Sequence] = {}
        self.wait_queue = WaitQueue()
        self.running: list[Sequence] = []
        self._block_holders: set[Sequence] = set()  # all who hold blocks
        self._num_reserved = 0
        self._config = config
        self._pool = pool
        self.block_tables = BlockTables(config.paging, pool)

    def add(self, sequence: Sequence) -> None:
        """A new sequence."""
        self.live[sequence.spec.key] = sequence
        self.wait_queue.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """The end of a sequence in whatever state; its blocks go back, at once or after the steps under way."""
        self._unlink(sequence)
        sequence.state = SequenceState.ENDED
        del self.live[sequence.spec.key]
        if not sequence.has_step_in_flight:
            self.block_tables.release(sequence)

    def on_step_done(self, chunk: ScheduledChunk) -> bool:
        """A step is done with this part of it; False when the sequence has ended meanwhile."""
        sequence = chunk.sequence
        sequence.num_computed += chunk.num_tokens
        sequence.num_expected -= chunk.has_sample
        if sequence.state is not SequenceState.ENDED:
            return True
        if not sequence.has_step_in_flight:
            self.block_tables.release(sequence)
        return False

    def hold(self, sequence: Sequence) -> None:
        """A prefill is complete: it computes no more, and keeps its blocks."""
        self.running.remove(sequence)
        sequence.state = SequenceState.HELD

    def complete_kv(self, sequence: Sequence, num_ready: int, suspects: Iterable[int]) -> bool:
        """Somebody else wrote the first `num_ready` prompt tokens of a reserved sequence: it may run now.

        Suspect blocks go to quarantine and new ones take their place; False when there are none: it queues again.
        """
        assert sequence.state is SequenceState.RESERVED
        sequence.has_received_kv = True
        num_hit = sequence.num_sealed
        # Matched blocks are shared and were never written to, so they cannot be suspect.
        fresh = [run.within(num_hit, run.end) for run in sequence.page_ranges]
        suspect = set(suspects).intersection(block for run in fresh for block in run.blocks)
        if suspect:
            num_ready = min(num_ready, self._num_trusted_tokens(fresh, suspect))
            if not self.block_tables.replace_suspect_blocks(sequence, suspect):
                self._preempt(sequence)
                return False
        sequence.set_computed(max(sequence.num_computed, min(num_ready, sequence.num_prompt)))
        self.block_tables.map_received(sequence, num_hit)
        sequence.num_cached = sequence.num_computed
        self._num_reserved -= 1
        self._run(sequence)
        return True

    def schedule(self, events: StepOutput, now: float, is_settled: bool) -> list[ScheduledChunk] | None:
        """The next step: one token for everyone who generates, then prompt chunks within the budget for that.

        None, when not `is_settled`: the step under way must be settled first, because somebody is to be preempted, or
        has no next token before the last one is known.
        """
        if not is_settled and any(each.num_expected and each.needs_host_tokens for each in self.running):
            return None
        num_running = len(self.running)
        for sequence in list(self.running):
            # An earlier turn of this loop may have preempted it.
            is_next = sequence.state is SequenceState.RUNNING and sequence.is_decoding
            if is_next and not self._allocate_next(sequence, is_settled):
                return None
        self._extend_prompts()
        # with somebody preempted, there is no room for others
        has_room = len(self.running) == num_running or not self.running
        if has_room and not self._admit(events, now, is_settled):
            return None
        self._extend_prompts()  # those who made way may have left more than was wanted
        return self._build_chunks(now)

    @property
    def num_reserved(self) -> int:
        """Sequences that wait for somebody else's KV."""
        return self._num_reserved

    @property
    def queued_prefill_tokens(self) -> int:
        """Prompt tokens to be computed here, as far as is known."""
        to_prefill = (sequence for sequence in self.running if not sequence.has_emitted)
        return self.wait_queue.num_prefill_tokens + sum(sequence.num_pending for sequence in to_prefill)

    @property
    def active_tokens(self) -> int:
        """Of all that live."""
        return self.wait_queue.num_tokens + sum(len(sequence.token_ids) for sequence in self._block_holders)

    def _extend_prompts(self) -> None:
        """Pages that prompts could not get when they last went on come before anybody new."""
        if self._config.paging.is_bounded:
            for sequence in self.running:
                if sequence.is_prefilling:
                    self.block_tables.release_out_of_window(sequence)

    def _build_chunks(self, now: float) -> list[ScheduledChunk]:
        """From here on the step counts as under way."""
        single = [sequence for sequence in self.running if sequence.is_decoding]
        prompts = (sequence for sequence in self.running if sequence.is_prefilling)
        others = sorted(prompts, key=lambda sequence: prefill_priority(sequence, now), reverse=True)
        if is_burst(self._config, single, others, now):
            rooms = {prompt: self.block_tables.capacity_tokens(prompt) - prompt.num_launched for prompt in others}
            if chunks := [self._chunk(*each, now) for each in burst_step(self._config, rooms)]:
                return chunks
        chunks = [self._chunk(sequence, 1, now) for sequence in single]
        budget, shared = self._config.prompt_budgets(is_mixed=bool(single))
        for sequence in others:
            num_tokens = min(
                budget, sequence.num_pending, self.block_tables.capacity_tokens(sequence) - sequence.num_launched
            )
            if num_tokens > 0:
                budget = min(budget, shared) - num_tokens  # the first prompt waits for those beside it
                chunks.append(self._chunk(sequence, num_tokens, now))
        return chunks

    def _chunk(self, sequence: Sequence, num_tokens: int, now: float) -> ScheduledChunk:
        chunk = ScheduledChunk(sequence, sequence.num_launched, num_tokens, num_tokens == sequence.num_pending)
        sequence.num_launched += num_tokens
        if chunk.has_sample:
            if not sequence.num_generated:
                sequence.started_at = now
            sequence.expect_tokens(self._config.context_tokens)
        return chunk

    def _admit(self, events: StepOutput, now: float, is_settled: bool) -> bool:
        """Let in who fits, in turn; False when somebody would have to be preempted for that, and may not."""
        while self.wait_queue:
            sequence = self.wait_queue.first
            while not self._allocate(sequence):
                if (victim := self._preemption_victim(sequence)) is None:
                    return True
                if not is_settled:
                    return False
                self._preempt(victim)
            self.wait_queue.remove(sequence)
            self._block_holders.add(sequence)
            if sequence.admitted_at is None:
                sequence.admitted_at = now
                sequence.num_cached = sequence.num_computed
            elif not sequence.has_emitted:
                sequence.num_cached = min(sequence.num_cached, sequence.num_computed)  # its own blocks are no hit
            if sequence.spec.wait_for_kv and not sequence.has_received_kv:
                sequence.state = SequenceState.RESERVED
                self._num_reserved += 1
                events.reserved.append(Reserved(sequence.spec.key, tuple(sequence.page_ranges), sequence.num_computed))
            else:
                self._run(sequence)
                report_progress(sequence, events)
        return True

    def _run(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.RUNNING
        insort(self.running, sequence, key=lambda other: other.queue_key)

    def _allocate(self, sequence: Sequence) -> bool:
        """Blocks for all its tokens, cached ones first; one more stays free for each sequence that may grow."""
        if len(self.running) + self._num_reserved >= self._config.max_num_seqs:
            return False
        num_hit = self.block_tables.allocate_prompt(sequence, self._num_growing)
        if num_hit is None:
            return False
        sequence.num_sealed = num_hit
        sequence.set_computed(num_hit * self._config.block_tokens)
        return True

    @property
    def _num_growing(self) -> int:
        return self._num_reserved + sum(not other.is_prefill for other in self.running)

    def _preemption_victim(self, sequence: Sequence) -> Sequence | None:
        """Who makes way for a sequence of higher priority: the last in turn, if all such together give room enough."""
        lower = [
            other
            for other in self.running
            if not other.is_prefill
            and other.queue_key > sequence.queue_key
            and other.spec.priority < sequence.spec.priority
        ]
        if not lower:
            return None
        wanted = (
            self.block_tables.num_prompt_blocks(sequence, self._num_growing - len(lower)) - self._pool.num_available
        )
        if sum(len(run.blocks) for other in lower for run in other.page_ranges) < wanted:
            return None  # told without looking at every block, since every step asks
        # blocks that somebody else holds as well stay where they are
        freed = self._pool.num_freeable(block for other in lower for run in other.page_ranges for block in run.blocks)
        return lower[-1] if freed >= wanted else None

    def _allocate_next(self, sequence: Sequence, is_settled: bool) -> bool:
        """A block for the next token, at the cost of the last in turn, maybe itself; False when that may not be."""
        num_new = self.block_tables.num_missing_blocks(sequence)
        while num_new > self._pool.num_available:
            if not is_settled:
                return False
            victim = next(other for other in reversed(self.running) if not other.is_prefill)
            self._preempt(victim)
            if victim is sequence:
                return True
        if num_new:
            self.block_tables.append_blocks(sequence)
        return True

    def _num_trusted_tokens(self, fresh: list[PageRange], suspect: set[int]) -> int:
        """Tokens before the first suspect page; none, where it depends on their number what lies in which page."""
        if self._config.paging.is_bounded:
            return 0
        (run,) = fresh
        return self._config.block_tokens * (run.first + min(map(run.blocks.index, suspect)))

    def _preempt(self, sequence: Sequence) -> None:
        """Preempt: tokens are kept, KV is found in the cache or computed again."""
        self._unlink(sequence)
        self.block_tables.release(sequence)
        sequence.state = SequenceState.WAITING
        sequence.set_computed(0)
        sequence.num_sealed = 0
        self.wait_queue.requeue(sequence)

    def _unlink(self, sequence: Sequence) -> None:
        self._block_holders.discard(sequence)
        if sequence.state is SequenceState.WAITING:
            self.wait_queue.remove(sequence)
        elif sequence.state is SequenceState.RESERVED:
            self._num_reserved -= 1
        elif sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)


def report_progress(sequence: Sequence, events: StepOutput) -> None:
    """For prefill sequences: what a peer may read by now."""
    if sequence.is_prefill and sequence.num_computed:
        num_ready = min(sequence.num_computed, sequence.num_prompt)
        events.progress.append(PromptProgress(sequence.spec.key, tuple(sequence.page_ranges), num_ready))
