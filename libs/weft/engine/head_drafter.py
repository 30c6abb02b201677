"""Drafts by a draft model between two steps, when the host knows all tokens of the sequences."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from weft.engine.drafting.drafter import DraftRequest, DraftSource, DraftToken, Proposal
from weft.engine.head_executor import HeadExecutor
from weft.engine.head_planner import HeadPlanner, HeadRows
from weft.engine.sampler import SamplingRowsMaker
from weft.engine.sequence import Sequence

# Lower bounds of the grades 1 to 5 of a draft, by the draft model's own probability of its token.
GRADES = (0.3, 0.5, 0.7, 0.85, 0.95)


class HeadDrafter:
    """See `weft.engine.drafting.drafter.DraftHead`."""

    def __init__(self, planner: HeadPlanner, executor: HeadExecutor, rows_of: SamplingRowsMaker) -> None:
        self._planner, self._executor, self._rows_of = planner, executor, rows_of

    @torch.inference_mode()
    def draft(
        self, requests: Items[DraftRequest], goes_on: Callable[[Sequence, Items[DraftToken]], bool]
    ) -> list[Proposal]:
        limits = {sequence: min(limit, self._room(sequence)) for sequence, limit in requests if limit > 0}
        rows, active = self._planner.plan_drafts(each for each, limit in limits.items() if limit > 0)
        drafts: dict[Sequence, list[DraftToken]] = {sequence: [] for sequence in active}
        if active:
            ends = [(sequence, len(sequence.token_ids) - 1 + limits[sequence]) for sequence in active]
            self._executor.zero([page for each in ends for page in self._planner.begun_pages(*each)])
            state = self._executor.fill(rows)[[end - 1 for end in rows.starts[1:]]]
        while active:
            token_ids = self._choose(state, active, drafts)
            going = [
                index
                for index, sequence in enumerate(active)
                if len(drafts[sequence]) < limits[sequence] and goes_on(sequence, drafts[sequence])
            ]
            if going and len(going) < len(active):
                state, token_ids = state[going], token_ids[going]
            active = [active[index] for index in going]
            if active:
                state = self._executor.forward(state, token_ids, self._next_rows(active, drafts))
        return [tuple(drafts.get(sequence, ())) for sequence, _ in requests]

    def forget(self, sequence: Sequence) -> None:
        self._planner.forget(sequence)

    def _room(self, sequence: Sequence) -> int:
        """Return the drafts that have pages: all but the last one of them get a slot."""
        return self._planner.capacity_tokens(sequence) - len(sequence.token_ids) + 1

    def _choose(self, state: Tensor, active: Items[Sequence], drafts: dict[Sequence, list[DraftToken]]) -> Tensor:
        positions = [len(sequence.token_ids) + len(drafts[sequence]) for sequence in active]
        sampling = self._rows_of([sequence.spec.sampling for sequence in active], positions)
        token_ids, probabilities = self._executor.choose(state, sampling)
        for sequence, token_id, probability in zip(active, token_ids.tolist(), probabilities.tolist(), strict=True):
            drafts[sequence].append(DraftToken(token_id, DraftSource.HEAD, bisect_right(GRADES, probability)))
        return token_ids

    def _next_rows(self, active: Items[Sequence], drafts: dict[Sequence, list[DraftToken]]) -> HeadRows:
        """Return one row for each sequence: its last draft, in the slot behind the row before."""
        rows = HeadRows(starts=list(range(len(active) + 1)), decodes=[True] * len(active))
        for sequence in active:
            position = len(sequence.token_ids) + len(drafts[sequence]) - 1
            slot, length, table, first = self._planner.draft_row(sequence, position)
            rows.positions.append(position)
            rows.slots.append(slot)
            rows.lens.append(length)
            rows.tables.append(table)
            rows.first.append(first)
        return rows
