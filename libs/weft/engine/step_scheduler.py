"""Continuous batching: admission, prompt chunks, block allocation and preemption, step by step.

Pure bookkeeping on sequences and block numbers: no tensors, no threads.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from weft.engine.block_tables import BlockTables
from weft.engine.config import EngineConfig
from weft.engine.draft_planner import DraftPlanner
from weft.engine.drafting.drafter import Proposal, Speculator
from weft.engine.messages import PromptProgress, Reserved, StepOutput
from weft.engine.sequence import Sequence, SequenceState
from weft.engine.wait_queue import WaitQueue, burst_step, is_burst, prefill_priority
from weft.errors import WeftError
from weft.kv.block_pool import BlockPool
from weft.kv.layer_groups import PageRange
from weft.request import PositionLogprobs, RequestKey


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Tokens [start, start + num_tokens) of a sequence, computed in one step.

    - `num_samples`: number of rows, at the chunk's end, that sample a token. It is 0 inside a prompt, and 1 at a
      prompt's end and while decoding without drafts. The first token may still be pending: the step in flight samples
      it.
    - `drafts`: the chunk's tokens behind the first one. Every row then samples a token.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    num_samples: int
    drafts: Proposal = ()

    @property
    def draft_ids(self) -> list[int]:
        """Token ids of the drafts."""
        return [draft.token_id for draft in self.drafts] if self.drafts else []

    @property
    def is_decode(self) -> bool:
        """True for the token, and drafts behind it, of a sequence that decodes."""
        return self.num_samples == self.num_tokens and not self.sequence.is_prefill

    @property
    def sampled_positions(self) -> range:
        """Positions at which the sampled tokens will stand."""
        end = self.start + self.num_tokens + 1
        return range(end - self.num_samples, end)

    @property
    def has_observer(self) -> bool:
        """True if an observer wants the hidden states of this chunk."""
        return self.sequence.has_observer and self.start < self.sequence.num_prompt


class SampledToken(NamedTuple):
    """A sampled token with its logprobs. If `failure` is set, there is no token and the sequence fails."""

    token_id: int
    logprobs: PositionLogprobs | None = None
    failure: WeftError | None = None


class StepScheduler:
    """Owns all sequences. `running` is sorted by queue key, like the wait queue; see `weft.engine.wait_queue`."""

    def __init__(self, config: EngineConfig, pool: BlockPool, speculator: Speculator | None = None) -> None:
        self.live: dict[RequestKey, Sequence] = {}
        self.wait_queue = WaitQueue()
        self.running: list[Sequence] = []
        self._block_holders: set[Sequence] = set()  # sequences that hold blocks
        self._num_reserved = 0
        self._config = config
        self._pool = pool
        self.block_tables = BlockTables(config.paging, pool)
        self._drafts = DraftPlanner(speculator, config, pool, self.block_tables) if speculator else None
        self._ended: list[Sequence] = []  # sequences that the speculator has not forgotten yet

    def add(self, sequence: Sequence) -> None:
        self.live[sequence.spec.key] = sequence
        self.wait_queue.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """End a sequence in any state. Its blocks are released at once, or after the steps in flight."""
        self._unlink(sequence)
        sequence.state = SequenceState.ENDED
        del self.live[sequence.spec.key]
        if not sequence.has_step_in_flight:
            self.block_tables.release(sequence)
        if self._drafts is not None:
            self._ended.append(sequence)

    def forget_ended(self) -> None:
        """Let the speculator forget the sequences that have ended. It must have seen their last steps."""
        if self._drafts is not None and self._ended:
            self._ended = self._drafts.forget(self._ended)

    def on_step_done(self, chunk: ScheduledChunk, num_kept: int) -> bool:
        """Account for a finished chunk. Returns False if the sequence has ended meanwhile.

        `num_kept`: rows that stand before the first rejected draft; without drafts all of the chunk.
        """
        sequence = chunk.sequence
        sequence.num_computed += num_kept
        sequence.num_expected -= chunk.num_samples
        if chunk.drafts:
            sequence.num_launched = sequence.num_computed
            sequence.last_token_pending = False
        if sequence.state is not SequenceState.ENDED:
            return True
        if not sequence.has_step_in_flight:
            self.block_tables.release(sequence)
        return False

    def hold(self, sequence: Sequence) -> None:
        """Keep the blocks of a finished prefill until they are released; it computes no more."""
        self.running.remove(sequence)
        sequence.state = SequenceState.HELD

    def complete_kv(self, sequence: Sequence, num_ready: int, suspects: Iterable[int], num_bare: int) -> bool:
        """Start a reserved sequence; a peer or a store has written the KV of its first `num_ready` prompt tokens.

        `num_bare`: see `Sequence`, of the received KV. Suspect blocks are quarantined and replaced. Returns False if
        the pool has no replacement: the sequence then waits again.
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
        if num_bare > sequence.num_computed:
            sequence.num_bare = min(num_bare, num_ready)
        sequence.set_computed(max(sequence.num_computed, min(num_ready, sequence.num_prompt)))
        self.block_tables.map_received(sequence, num_hit)
        sequence.num_cached = sequence.num_computed
        self._num_reserved -= 1
        self._run(sequence)
        return True

    def schedule(self, events: StepOutput, now: float, is_drained: bool) -> list[ScheduledChunk] | None:
        """Return the next step: one token of each decoding sequence, then prompt chunks within their budget.

        `is_drained`: no step is in flight. If one is, the result may be None: the caller must finish that step first,
        because a sequence must be preempted or needs its last token before the next one.
        """
        if not is_drained and any(each.num_expected and each.needs_host_tokens for each in self.running):
            return None
        if self._drafts is not None and not is_drained and self._drafts.is_due(self.running):
            return None
        num_running = len(self.running)
        for sequence in list(self.running):
            # An earlier iteration of this loop may have preempted it.
            is_next = sequence.state is SequenceState.RUNNING and sequence.is_decoding
            if is_next and not self._allocate_next(sequence, is_drained):
                return None
        self._extend_prompts()
        # After a preemption there are no blocks for new sequences.
        has_room = len(self.running) == num_running or not self.running
        if has_room and not self._admit(events, now, is_drained):
            return None
        self._extend_prompts()  # a preemption may have freed more blocks than were needed
        return self._build_chunks(now, is_drained)

    @property
    def num_reserved(self) -> int:
        """Sequences that wait for KV from a peer or a store."""
        return self._num_reserved

    @property
    def queued_prefill_tokens(self) -> int:
        """Prompt tokens to be computed here, as far as known: a prefix hit may lower it."""
        to_prefill = (sequence for sequence in self.running if not sequence.has_emitted)
        return self.wait_queue.num_prefill_tokens + sum(sequence.num_pending for sequence in to_prefill)

    @property
    def active_tokens(self) -> int:
        """Tokens of all live sequences."""
        return self.wait_queue.num_tokens + sum(len(sequence.token_ids) for sequence in self._block_holders)

    def _extend_prompts(self) -> None:
        """Give running prompts the pages that they lacked, before new sequences are admitted."""
        if self._config.paging.is_bounded:
            for sequence in self.running:
                if sequence.is_prefilling:
                    self.block_tables.release_out_of_window(sequence)

    def _build_chunks(self, now: float, is_drained: bool) -> list[ScheduledChunk]:
        """Choose the chunks of the next step. From here on the step counts as in flight."""
        single = [sequence for sequence in self.running if sequence.is_decoding]
        others: list[Sequence] = []
        if len(single) < len(self.running):
            others = [sequence for sequence in self.running if sequence.is_prefilling]
            others.sort(key=lambda sequence: prefill_priority(sequence, now), reverse=True)
        if is_burst(self._config, single, others, now):
            capacities = {prompt: self.block_tables.capacity_tokens(prompt) - prompt.num_launched for prompt in others}
            if chunks := [self._chunk(*each, now) for each in burst_step(self._config, capacities)]:
                return chunks
        parts: list[tuple[Sequence, int]] = []
        budget, shared = self._config.prompt_budgets(is_mixed=bool(single))
        for sequence in others:
            num_tokens = min(
                budget, sequence.num_pending, self.block_tables.capacity_tokens(sequence) - sequence.num_launched
            )
            if num_tokens > 0:
                budget = min(budget, shared) - num_tokens  # the first prompt waits for the others too
                parts.append((sequence, num_tokens))
        if self._config.has_draft_layer:
            for sequence in single:
                sequence.is_bare = self._is_bare(sequence)
        proposals: list[Proposal] = [()] * len(single)
        if self._drafts is not None and single and is_drained:
            proposals = self._drafts.plan(single, sum(num_tokens for _, num_tokens in parts), self._num_growing)
        decoding = [self._chunk(sequence, 1, now, drafts) for sequence, drafts in zip(single, proposals, strict=True)]
        return decoding + [self._chunk(*each, now) for each in parts]

    def _chunk(self, sequence: Sequence, num_tokens: int, now: float, drafts: Proposal = ()) -> ScheduledChunk:
        """Return a chunk of the next `num_tokens` tokens and drafts behind them."""
        start, num_samples = sequence.num_launched, int(num_tokens == sequence.num_pending)
        if drafts:
            num_tokens, num_samples = num_tokens + len(drafts), num_samples + len(drafts)
        sequence.num_launched = start + num_tokens
        if num_samples:
            if not sequence.num_generated:
                sequence.started_at = now
            sequence.expect_tokens(num_samples, self._config.context_tokens)
        return ScheduledChunk(sequence, start, num_tokens, num_samples, drafts)

    def _admit(self, events: StepOutput, now: float, is_drained: bool) -> bool:
        """Admit waiting sequences in queue order; False if that needs a preemption while a step is in flight."""
        while self.wait_queue:
            sequence = self.wait_queue.first
            while not self._allocate(sequence):
                if (victim := self._preemption_victim(sequence)) is None:
                    return True
                if not is_drained:
                    return False
                self._preempt(victim)
            self.wait_queue.remove(sequence)
            self._block_holders.add(sequence)
            sequence.is_bare = self._is_bare(sequence)
            if sequence.admitted_at is None:
                sequence.admitted_at = now
                sequence.num_cached = sequence.num_computed
            elif not sequence.has_emitted:
                sequence.num_cached = min(sequence.num_cached, sequence.num_computed)  # not its own blocks
            if sequence.spec.wait_for_kv and not sequence.has_received_kv:
                sequence.state = SequenceState.RESERVED
                self._num_reserved += 1
                pages = tuple(sequence.page_ranges)
                events.reserved.append(Reserved(sequence.spec.key, pages, sequence.num_computed, sequence.is_bare))
            else:
                self._run(sequence)
                report_progress(sequence, events)
        return True

    def _is_bare(self, sequence: Sequence) -> bool:
        """Return True if the sequence's next step should not fill the draft layer."""
        if sequence.is_prefill or self._drafts is None:
            return sequence.spec.is_bare
        return not self._drafts.fills_draft_layer(sequence)

    def _run(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.RUNNING
        insort(self.running, sequence, key=lambda other: other.queue_key)

    def _allocate(self, sequence: Sequence) -> bool:
        """Allocate blocks for all tokens, cached ones first. One more stays free for each sequence that may grow."""
        if len(self.running) + self._num_reserved >= self._config.max_num_seqs:
            return False
        hit = self.block_tables.allocate_prompt(sequence, self._num_growing)
        if hit is None:
            return False
        sequence.num_sealed = hit.num_blocks
        sequence.num_bare = hit.num_bare * self._config.block_tokens
        sequence.set_computed(hit.num_blocks * self._config.block_tokens)
        return True

    @property
    def _num_growing(self) -> int:
        return self._num_reserved + sum(not other.is_prefill for other in self.running)

    def _preemption_victim(self, sequence: Sequence) -> Sequence | None:
        """Return the sequence to preempt for one of higher priority: the last in queue order.

        Returns None if all sequences of lower priority together hold too few blocks.
        """
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
            return None  # a cheap bound first: every step asks
        # Blocks that another sequence shares are not freed.
        freed = self._pool.num_freeable(block for other in lower for run in other.page_ranges for block in run.blocks)
        return lower[-1] if freed >= wanted else None

    def _allocate_next(self, sequence: Sequence, is_drained: bool) -> bool:
        """Allocate the blocks of the next token, preempting the last in queue order, possibly this one.

        Returns False if that needs a preemption while a step is in flight.
        """
        num_new = self.block_tables.num_missing_blocks(sequence)
        while num_new > self._pool.num_available:
            if not is_drained:
                return False
            victim = next(other for other in reversed(self.running) if not other.is_prefill)
            self._preempt(victim)
            if victim is sequence:
                return True
        if num_new:
            self.block_tables.append_blocks(sequence)
        return True

    def _num_trusted_tokens(self, fresh: list[PageRange], suspect: set[int]) -> int:
        """Return the tokens before the first suspect page; 0 with windows, where pages move with the token count."""
        if self._config.paging.is_bounded:
            return 0
        (run,) = fresh
        return self._config.block_tokens * (run.first + min(map(run.blocks.index, suspect)))

    def _preempt(self, sequence: Sequence) -> None:
        """Preempt a sequence. It keeps its tokens; its KV is found in the cache or computed again."""
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
    """Report the KV of a prefill sequence that a peer may read now."""
    if sequence.is_prefill and sequence.num_computed:
        num_ready = min(sequence.num_computed, sequence.num_prompt)
        events.progress.append(PromptProgress(sequence.spec.key, tuple(sequence.page_ranges), num_ready))
