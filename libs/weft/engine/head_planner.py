"""Which slots of a draft layer are filled, and which rows of the draft model fill the others. Numbers only, no torch.

Slot j of the draft layer holds the KV of a row with the target's feature of token j-1 and token j. So the draft layer
fills the same slots as the target, and a block's draft KV depends only on the tokens in the block's key. Slot 0 has no
feature: it stays zero, and no row looks at it.

The features of a sequence's last computed tokens stay on the device, in a seat. A prompt's slots are filled in the step
that computes them. While a sequence decodes, the rows wait for the step that completes a block, or for the next drafts.

A bare sequence has no rows here, and its slots stay zero. Once it is no longer bare, its rows see only the slots from
`Sequence.num_bare` on.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import NamedTuple

from weft.capacity.draft import feature_rows, step_rows
from weft.engine.config import EngineConfig
from weft.engine.page_slots import Tables, attention_context, slots
from weft.engine.sequence import Sequence
from weft.engine.step_scheduler import ScheduledChunk


def num_feature_places(config: EngineConfig) -> int:
    """Return the features of all seats."""
    return config.max_num_seqs * feature_rows(config.block_tokens, config.max_drafts)


def max_step_rows(config: EngineConfig) -> int:
    """Return the most rows of a step: prompts, sequences that decode and their drafts, and repeated tokens."""
    return step_rows(config.max_step_tokens, config.max_num_seqs)


@dataclass(slots=True)
class HeadRows:
    """T rows of the draft model for S sequences.

    - `token_ids`, `positions`, `slots`, `features` [T]: `slots` are those of the head's group of layers. `features` are
      places; from `num_feature_places` on they count the rows of the step.
    - `pending`: pairs (row, row of the step). The host does not know the row's token; it is that of the step's row.
    - `starts` [S + 1], `decodes`, `lens`, `tables`, `first` [S]: see `PagedBatch`.
    """

    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    features: list[int] = field(default_factory=list)
    pending: list[tuple[int, int]] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    decodes: list[bool] = field(default_factory=list)
    lens: list[int] = field(default_factory=list)
    tables: Tables = field(default_factory=list)
    first: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class HeadStep:
    """What the draft model does in a step: it computes the rows `fill`, and the step's rows `kept` stay at `places`."""

    fill: HeadRows
    kept: list[int]
    places: list[int]

    @property
    def is_empty(self) -> bool:
        """True if all sequences of the step are bare."""
        return not self.kept and not self.fill.token_ids


class _ChunkRows(NamedTuple):
    """Rows of the step that compute a chunk. `boundary`: row of the token before it, if the step computes that too."""

    chunk: ScheduledChunk
    first_row: int
    boundary: int | None

    @property
    def first(self) -> int:
        """The first position with a row."""
        return self.chunk.start - (self.boundary is not None)

    @property
    def end(self) -> int:
        return self.chunk.start + self.chunk.num_tokens

    def row(self, position: int) -> int:
        if position < self.chunk.start:
            assert self.boundary is not None
            return self.boundary
        return self.first_row + position - self.chunk.start


@dataclass(slots=True)
class _Seat:
    """Features of tokens [first, end) of a sequence, and how far its slots are filled.

    - `num_filled`: slots before it hold what the sequence's tokens give.
    - `start`, `end`: the last launched chunk. Its drafts may have been rejected, so the next one starts in between.
    - `drafted_at`: position of the last token for which drafts were made. Its slot is filled before it is computed.
    """

    index: int
    num_filled: int = 0
    first: int = 0
    start: int = 0
    end: int = 0
    drafted_at: int = -1

    def has_feature(self, position: int) -> bool:
        return self.first <= position < self.end

    def continues_at(self, start: int) -> bool:
        return self.start < start <= self.end

    def resume(self, start: int) -> None:
        """Forget the slots of rejected drafts, or start again after KV that was not computed here."""
        if not self.continues_at(start):
            self.num_filled, self.drafted_at = start, -1
        self.num_filled = min(self.num_filled, start + (self.drafted_at == start))
        self.end = min(self.end, start)


class HeadPlanner:
    """Tracks the draft layer of each sequence. Call `boundaries`, then `plan`, for every step in order.

    `group`: the group of layers that the draft layer belongs to. `zeroed`: pages that `plan_drafts` has begun since the
    last step; the step must not zero them again.
    """

    def __init__(self, config: EngineConfig, group: int) -> None:
        self.zeroed: set[int] = set()
        self._width, self._num_places = feature_rows(config.block_tokens, config.max_drafts), num_feature_places(config)
        self._paging, self._group, self._size = config.paging, group, config.block_tokens
        self._seats: dict[Sequence, _Seat] = {}  # the least recently used first
        self._free = list(range(config.max_num_seqs))

    def boundaries(self, chunks: Iterable[ScheduledChunk]) -> list[ScheduledChunk]:
        """Return the chunks with a first slot for which no seat has the feature.

        It is that of the last token with KV from elsewhere: a cache, a peer, or this engine before a preemption. The
        step must compute that token once more, with its KV in a scratch slot. A chunk behind a token without draft KV
        does without: its first slot stays zero too.
        """
        return [
            chunk
            for chunk in chunks
            if chunk.start > chunk.sequence.num_bare
            and not chunk.sequence.is_bare
            and not self._has_feature(chunk.sequence, chunk.start - 1)
        ]

    def unfilled_pages(self, chunks: Iterable[ScheduledChunk]) -> list[int]:
        """Return the pages that the chunks begin, with slots that no row of the draft model fills.

        They must be zeroed: those of bare sequences, and that of slot 0.
        """
        pages: list[int] = []
        for chunk in chunks:
            begun = range(-(-chunk.start // self._size), -(-(chunk.start + chunk.num_tokens) // self._size))
            if chunk.sequence.is_bare:
                pages += chunk.sequence.page_ranges[self._group].within(begun.start, begun.stop).blocks
            elif not chunk.start:
                pages += chunk.sequence.page_ranges[self._group].blocks[:1]
        return pages

    def plan(self, chunks: Items[ScheduledChunk], starts: Items[int], boundaries: Items[ScheduledChunk]) -> HeadStep:
        """Return the draft model's part of a step.

        `starts`: first row of each of the step's sequences: those of `boundaries` with one row each, then the chunks.
        """
        self.zeroed.clear()
        lone = {chunk.sequence: row for row, chunk in enumerate(boundaries)}
        step = HeadStep(HeadRows(), [], [])
        for chunk, first_row in zip(chunks, starts[len(boundaries) :], strict=False):
            if chunk.sequence.is_bare:
                self.forget(chunk.sequence)
                chunk.sequence.num_bare = chunk.start + chunk.num_tokens
            else:
                self._plan_chunk(_ChunkRows(chunk, first_row, lone.get(chunk.sequence)), step)
        return step

    def plan_drafts(self, sequences: Iterable[Sequence]) -> tuple[HeadRows, list[Sequence]]:
        """Return the rows that fill the slots up to the last token of each sequence, and the sequences that have them.

        The last row of each gives its first draft. Sequences without the feature of the token before are left out.
        """
        rows, planned = HeadRows(), []
        for sequence in sequences:
            last = len(sequence.token_ids) - 1
            seat = self._seats.get(sequence)
            if seat is None or not seat.continues_at(last) or not seat.has_feature(last - 1):
                continue
            seat.resume(last)
            seat.num_filled = min(seat.num_filled, last)
            self._add(rows, sequence, seat, last + 1, None)
            seat.num_filled, seat.drafted_at = last + 1, last
            planned.append(sequence)
        return rows, planned

    def begun_pages(self, sequence: Sequence, end: int) -> list[int]:
        """Return the pages that rows for drafts up to position `end` begin; they must be zeroed first."""
        run = sequence.page_ranges[self._group]
        first = -(-(len(sequence.token_ids) - 1) // self._size)
        pages = run.within(first, end // self._size + 1).blocks
        self.zeroed.update(pages)
        return list(pages)

    def draft_row(self, sequence: Sequence, position: int) -> tuple[int, int, tuple[int, ...], int]:
        """Return slot, context length, page table and first slot to look at of a row at `position`."""
        run = sequence.page_ranges[self._group]
        length, table = attention_context(self._paging, self._group, run, position + 1)
        return next(iter(slots(run, position, position + 1, self._size))), length, table, self._first(sequence)

    def capacity_tokens(self, sequence: Sequence) -> int:
        """Return the tokens for which the sequence has pages in the head's group."""
        return sequence.page_ranges[self._group].end * self._size

    def forget(self, sequence: Sequence) -> None:
        """Release the seat of a sequence that has ended."""
        if (seat := self._seats.pop(sequence, None)) is not None:
            self._free.append(seat.index)

    def _has_feature(self, sequence: Sequence, position: int) -> bool:
        seat = self._seats.get(sequence)
        return seat is not None and seat.has_feature(position)

    def _seat(self, sequence: Sequence) -> _Seat:
        """Return the sequence's seat. A new one may be that of a sequence that waits after a preemption."""
        seat = self._seats.pop(sequence, None)
        if seat is None:
            if not self._free:
                self.forget(next(iter(self._seats)))
            seat = _Seat(self._free.pop())
        self._seats[sequence] = seat
        return seat

    def _plan_chunk(self, source: _ChunkRows, step: HeadStep) -> None:
        chunk, end = source.chunk, source.end
        seat = self._seat(chunk.sequence)
        if not seat.has_feature(chunk.start - 1):
            seat.first = source.first
            if chunk.start and source.boundary is None:
                chunk.sequence.num_bare = chunk.start + 1
        seat.resume(chunk.start)
        if not chunk.is_decode or end // self._size > chunk.start // self._size:
            self._add(step.fill, chunk.sequence, seat, end, source)
            seat.num_filled = end
        # A prompt's next chunk needs only the last feature.
        seat.first = max(seat.first, end - self._width if chunk.is_decode else end - 1)
        kept = range(max(source.first, seat.first), end)
        step.kept.extend(map(source.row, kept))
        step.places.extend(self._place(seat, position) for position in kept)
        seat.start, seat.end = chunk.start, end

    def _add(self, rows: HeadRows, sequence: Sequence, seat: _Seat, end: int, source: _ChunkRows | None) -> None:
        """Add the rows of the slots from `seat.num_filled` to `end`; `source`: a chunk that leaves features."""
        start = max(1, seat.num_filled, sequence.num_bare)
        if start >= end:
            return
        run = sequence.page_ranges[self._group]
        length, table = attention_context(self._paging, self._group, run, end)
        num_rows = len(rows.token_ids)
        known = [*sequence.token_ids[start:end], *(source.chunk.draft_ids if source else ())]
        for position in range(start + len(known), end):
            assert source is not None
            rows.pending.append((num_rows + position - start, source.row(position)))
            known.append(0)
        rows.token_ids += known
        rows.positions += range(start, end)
        rows.slots += slots(run, start, end, self._size)
        rows.features += [self._feature(seat, position, source) for position in range(start - 1, end - 1)]
        rows.starts.append(len(rows.token_ids))
        rows.decodes.append(source is None or source.chunk.is_decode)
        rows.lens.append(length)
        rows.tables.append(table)
        rows.first.append(self._first(sequence))

    def _feature(self, seat: _Seat, position: int, source: _ChunkRows | None) -> int:
        if source is not None and source.first <= position:
            return self._num_places + source.row(position)
        return self._place(seat, position)

    def _place(self, seat: _Seat, position: int) -> int:
        return seat.index * self._width + position % self._width

    def _first(self, sequence: Sequence) -> int:
        """Return the first slot to look at, relative to the page table: slot 0 of a sequence has no feature."""
        num_skipped = self._paging.skipped_blocks(self._group, sequence.page_ranges[self._group].first)
        return max(0, max(1, sequence.num_bare) - num_skipped * self._size)
