"""Drafts by a draft model between two steps, when the host knows all tokens of the sequences."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from typing import Protocol

import torch

from weft.engine.drafting.drafter import DraftRequest, DraftSource, DraftToken, Proposal
from weft.engine.head_executor import HeadExecutor
from weft.engine.head_graphs import HeadGraphs
from weft.engine.head_planner import HeadPlanner, HeadRows
from weft.engine.sampler import SamplingRowsMaker
from weft.engine.sequence import Sequence

# Lower bounds of the grades 1 to 5 of a draft, by the draft model's own probability of its token.
GRADES = (0.3, 0.5, 0.7, 0.85, 0.95)


class DraftRun(Protocol):
    """Passes of the draft model, each of which gives one draft to every sequence in them."""

    def choose(self) -> tuple[list[int], list[float]]:
        """Wait for the pass; return each sequence's draft, and the draft model's probability of it."""

    def step(self, going: Items[int]) -> None:
        """Begin the next pass, behind the drafts chosen last, for the sequences at these places only."""


class HeadDrafter:
    """See `weft.engine.drafting.drafter.DraftHead`."""

    def __init__(
        self,
        planner: HeadPlanner,
        executor: HeadExecutor,
        rows_of: SamplingRowsMaker,
        graphs: HeadGraphs | None = None,
    ) -> None:
        """`graphs`: replay passes of as many sequences as these have room for."""
        self._planner, self._executor, self._rows_of, self._graphs = planner, executor, rows_of, graphs

    @torch.inference_mode()
    def draft(
        self, requests: Items[DraftRequest], goes_on: Callable[[Sequence, Items[DraftToken]], bool]
    ) -> list[Proposal]:
        limits = {sequence: min(limit, self._room(sequence)) for sequence, limit in requests if limit > 0}
        rows, active = self._planner.plan_drafts(each for each, limit in limits.items() if limit > 0)
        drafts: dict[Sequence, list[DraftToken]] = {sequence: [] for sequence in active}
        run = self._start(rows, active, limits) if active else None
        while run is not None:
            for sequence, token_id, probability in zip(active, *run.choose(), strict=True):
                drafts[sequence].append(DraftToken(token_id, DraftSource.HEAD, bisect_right(GRADES, probability)))
            going = [
                index
                for index, sequence in enumerate(active)
                if len(drafts[sequence]) < limits[sequence] and goes_on(sequence, drafts[sequence])
            ]
            if not going:
                break
            active = [active[index] for index in going]
            run.step(going)
        return [tuple(drafts.get(sequence, ())) for sequence, _ in requests]

    def forget(self, sequence: Sequence) -> None:
        self._planner.forget(sequence)

    def _room(self, sequence: Sequence) -> int:
        """Return the drafts that have pages: all but the last one of them get a slot."""
        return self._planner.capacity_tokens(sequence) - len(sequence.token_ids) + 1

    def _start(self, rows: HeadRows, sequences: list[Sequence], limits: Mapping[Sequence, int]) -> DraftRun:
        """Fill the slots up to the last token of each sequence."""
        ends = [(sequence, len(sequence.token_ids) - 1 + limits[sequence]) for sequence in sequences]
        self._executor.zero([page for each in ends for page in self._planner.begun_pages(*each)])
        if self._graphs is not None:
            lens = [length + limits[sequence] - 1 for length, sequence in zip(rows.lens, sequences, strict=True)]
            positions = [len(sequence.token_ids) for sequence in sequences]
            sampling = self._rows_of([sequence.spec.sampling for sequence in sequences], positions)
            if (run := self._graphs.start(rows, lens, sampling)) is not None:
                return run
        return _PassByPass(self._planner, self._executor, self._rows_of, sequences, rows)


class _PassByPass:
    """Passes that the host launches kernel by kernel, with the rows of the sequences that still draft."""

    def __init__(
        self,
        planner: HeadPlanner,
        executor: HeadExecutor,
        rows_of: SamplingRowsMaker,
        sequences: list[Sequence],
        rows: HeadRows,
    ) -> None:
        self._planner, self._executor, self._rows_of, self._sequences = planner, executor, rows_of, sequences
        self._num_drafts = 0
        self._state = executor.fill(rows)[[end - 1 for end in rows.starts[1:]]]
        self._token_ids = torch.empty(0)

    def choose(self) -> tuple[list[int], list[float]]:
        positions = [len(sequence.token_ids) + self._num_drafts for sequence in self._sequences]
        sampling = self._rows_of([sequence.spec.sampling for sequence in self._sequences], positions)
        self._token_ids, probabilities = self._executor.choose(self._state, sampling)
        self._num_drafts += 1
        return self._token_ids.tolist(), probabilities.tolist()

    def step(self, going: Items[int]) -> None:
        if len(going) < len(self._sequences):
            self._sequences = [self._sequences[index] for index in going]
            self._state, self._token_ids = self._state[going], self._token_ids[going]
        self._state = self._executor.forward(self._state, self._token_ids, self._next_rows())

    def _next_rows(self) -> HeadRows:
        """Return one row for each sequence: its last draft, in the slot behind the row before."""
        rows = HeadRows(starts=list(range(len(self._sequences) + 1)), decodes=[True] * len(self._sequences))
        for sequence in self._sequences:
            position = len(sequence.token_ids) + self._num_drafts - 1
            slot, length, table, first = self._planner.draft_row(sequence, position)
            rows.positions.append(position)
            rows.slots.append(slot)
            rows.lens.append(length)
            rows.tables.append(table)
            rows.first.append(first)
        return rows
