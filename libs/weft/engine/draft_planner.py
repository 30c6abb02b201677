"""Asks the speculator for drafts, and gives their sequences pages. No tensors."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items

from weft.capacity.draft import MIN_SAMPLED_ROWS
from weft.engine.block_tables import BlockTables
from weft.engine.config import EngineConfig
from weft.engine.drafting.drafter import DraftRequest, Proposal, Speculator
from weft.engine.sequence import Sequence
from weft.kv.block_pool import BlockPool

# The loop that runs one step ahead asks at least once in this many steps: to ask, it must finish the step in flight.
ASK_STEPS = 8


class DraftPlanner:
    """Drafts take only pages that remain free beyond one of each group for every growing sequence.

    The pages are released after the step. So drafts preempt no sequence and delay no admission.
    """

    def __init__(
        self, speculator: Speculator, config: EngineConfig, pool: BlockPool, block_tables: BlockTables
    ) -> None:
        self._speculator = speculator
        self._config = config
        self._pool = pool
        self._block_tables = block_tables
        self._num_groups = len(config.paging.spans)
        self._max_drafts = min(config.max_drafts, config.chunk_tokens - 1)
        self._num_quiet_steps = ASK_STEPS  # steps planned since the last one with drafts

    def fills_draft_layer(self, sequence: Sequence) -> bool:
        """Return True if the sequence's next step should fill the draft layer, if there is one."""
        return not self._config.has_draft_layer or self._speculator.fills_draft_layer(sequence)

    def is_due(self, running: Iterable[Sequence]) -> bool:
        """Return True if the next step should wait for the one in flight, so that sequences can draft.

        While the speculator proposes something, it is asked before every step, otherwise before one in `ASK_STEPS`.
        """
        self._num_quiet_steps += 1
        return self._num_quiet_steps >= ASK_STEPS and any(_may_draft(sequence) for sequence in running)

    def plan(self, decoding: Items[Sequence], num_prompt_rows: int, num_growing: int) -> list[Proposal]:
        """Return the drafts of each decoding sequence, and give it the pages for them. No step may be in flight."""
        num_spare = self._pool.num_available - num_growing * self._num_groups
        num_rows = max(self._config.max_num_seqs, MIN_SAMPLED_ROWS) - len(decoding)
        requests: list[DraftRequest] = []
        for sequence in decoding:
            limit = min(num_rows, self._limit(sequence, num_spare))
            requests.append(DraftRequest(sequence, limit))
            if self._config.has_draft_layer:
                num_spare -= self._reserve(sequence, limit)  # a draft model writes to the pages before it proposes
        proposals = self._speculator.propose(requests, num_prompt_rows)
        granted: list[Proposal] = []
        for (sequence, limit), proposal in zip(requests, proposals, strict=True):
            drafts = proposal[: min(limit, num_rows, self._num_places(sequence, num_spare))]
            granted.append(drafts := _valid(sequence, drafts))
            num_rows -= len(drafts)
            if drafts:
                num_spare -= self._reserve(sequence, len(drafts))
            if self._config.has_draft_layer:
                self._block_tables.release_unused(sequence, len(drafts))
        self._num_quiet_steps = ASK_STEPS if any(granted) else 0
        return granted

    def _reserve(self, sequence: Sequence, num_drafts: int) -> int:
        """Give a sequence the pages for drafts. Returns how many were added."""
        num_pages = self._block_tables.num_missing_blocks(sequence, num_drafts)
        if num_pages:
            self._block_tables.append_blocks(sequence, num_drafts)
        return num_pages

    def forget(self, ended: Iterable[Sequence]) -> list[Sequence]:
        """Drop the speculator's state of ended sequences, and return those that a step in flight still computes."""
        computing: list[Sequence] = []
        for sequence in ended:
            if sequence.has_step_in_flight:
                computing.append(sequence)
            else:
                self._speculator.forget(sequence)
        return computing

    def _limit(self, sequence: Sequence, num_spare: int) -> int:
        if not _may_draft(sequence):
            return 0
        num_left = sequence.num_tokens_left(self._config.context_tokens) - 1
        return max(0, min(self._max_drafts, num_left, self._num_places(sequence, num_spare)))

    def _num_places(self, sequence: Sequence, num_spare: int) -> int:
        """Return the drafts that have room in the sequence's own pages and `num_spare` others."""
        num_more = max(0, num_spare) // self._num_groups * self._config.block_tokens
        return self._block_tables.capacity_tokens(sequence) + num_more - len(sequence.token_ids)


def _may_draft(sequence: Sequence) -> bool:
    """Return True if drafts are wanted. The prompt's own rows never have any."""
    return sequence.spec.speculation.is_enabled and sequence.is_decoding and sequence.has_emitted


def _valid(sequence: Sequence, drafts: Proposal) -> Proposal:
    """Cut a proposal before the first token that the grammar refuses: a matcher never recovers from one."""
    if not drafts or sequence.spec.constraint is None:
        return drafts
    constraint = sequence.token_history().advance(sequence.token_ids, len(sequence.token_ids))
    return drafts[: constraint.valid([draft.token_id for draft in drafts])]
