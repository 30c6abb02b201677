"""Which pages a sequence holds in each group of layers: found, had, given back as it goes on. Pure bookkeeping.

Knows sequences and block numbers; knows neither tensors nor turns.
"""

from __future__ import annotations

from collections.abc import Iterable

from weft.engine.sequence import Sequence
from weft.kv.block_pool import BlockPool, PoolExhausted
from weft.kv.layer_groups import PageRun, Paging, page_key


class Pages:
    """Changes `runs` of sequences, and nothing else of them."""

    def __init__(self, paging: Paging, pool: BlockPool) -> None:
        self._paging = paging
        self._pool = pool
        self._groups = range(len(paging.reaches))
        self._bounded = [group for group in self._groups if paging.reaches[group].width]

    def seat(self, sequence: Sequence, num_growing: int) -> int | None:
        """Pages to begin with, found ones first; returns the found blocks of the prefix, None when there is no room.

        One more page a group stays free for each of `num_growing` sequences.
        """
        paging, size = self._paging, self._paging.block_tokens
        keys = sequence.reusable_keys(size)
        num_hit = paging.longest_hit(keys, self._pool.is_known)
        hits = [self._find(keys[:num_hit], group) for group in self._groups]
        num_blocks = paging.num_blocks(len(sequence.token_ids))
        wanted = [paging.num_new(group, num_hit, num_blocks) for group in self._groups]
        if sum(wanted) + num_growing * len(wanted) > self._pool.num_available:
            for run in hits:
                self._pool.release(run.blocks)
            return None
        sequence.runs = [self._extended(*each) for each in zip(hits, wanted, strict=True)]
        return num_hit

    def num_wanted(self, sequence: Sequence, num_growing: int) -> int:
        """Pages that must be available for `seat`, when none are found."""
        num_blocks = self._paging.num_blocks(len(sequence.token_ids))
        return sum([self._paging.num_new(group, 0, num_blocks) + num_growing for group in self._groups])

    def num_lacking(self, sequence: Sequence) -> int:
        """Pages that it takes to go on."""
        num_blocks = self._paging.num_blocks(sequence.num_tokens)
        return sum([num_blocks - run.end for run in sequence.runs])

    def grow(self, sequence: Sequence) -> None:
        """Pages for its next token; they must be available."""
        num_blocks = self._paging.num_blocks(sequence.num_tokens)
        for group, run in enumerate(sequence.runs):
            if num_blocks > run.end:
                sequence.runs[group] = self._extended(run, num_blocks - run.end)

    def slide(self, sequence: Sequence) -> None:
        """After a step: pages that no later token looks at go back, and their like come for the rest of the prompt.

        A step under way is later: it looks at nothing that goes.
        """
        for group in self._bounded:
            run = sequence.runs[group]
            is_short = run.end < self._paging.num_blocks(sequence.num_tokens)
            if is_short or self._paging.first(group, self._sight(sequence, group)) > run.first:
                self._move(sequence, group, run.end)

    def place(self, sequence: Sequence, num_hit: int) -> None:
        """KV came from elsewhere: pages behind the `num_hit` found blocks come to lie where they were filled."""
        for group in self._bounded:
            self._move(sequence, group, num_hit)

    def room(self, sequence: Sequence) -> int:
        """Tokens that have pages in all groups; with pages short in the pool, fewer than a step may want."""
        return min([run.end for run in sequence.runs]) * self._paging.block_tokens

    def replace(self, sequence: Sequence, suspect: set[int]) -> bool:
        """Swap the suspect pages. False: not enough others, and the sequence has given all back."""
        self._pool.quarantine(suspect)
        try:
            fresh = iter(self._pool.reserve(len(suspect)))
        except PoolExhausted:
            for run in sequence.runs:
                self._pool.release([block for block in run.blocks if block not in suspect])
            sequence.runs = []
            return False
        sequence.runs = [
            PageRun(run.first, tuple(next(fresh) if block in suspect else block for block in run.blocks))
            for run in sequence.runs
        ]
        return True

    def release(self, sequence: Sequence) -> None:
        """All of them."""
        for run in sequence.runs:
            self._pool.release(run.blocks)
        sequence.runs = []

    def _move(self, sequence: Sequence, group: int, num_fixed: int) -> None:
        paging, run = self._paging, sequence.runs[group]
        num_blocks = paging.num_blocks(sequence.num_tokens)
        kept = paging.placed(group, run, num_fixed, self._sight(sequence, group))
        num_left = len(run.blocks) - len(kept.blocks)
        self._pool.release(run.blocks[:num_left])
        if kept.end > num_blocks:
            self._pool.release(kept.within(num_blocks, kept.end).blocks)
            kept = kept.within(kept.first, num_blocks)
        wanted = min(num_blocks, kept.first + paging.most(group)) - kept.end
        sequence.runs[group] = self._extended(kept, min(max(0, wanted), self._pool.num_available))

    def _sight(self, sequence: Sequence, group: int) -> int:
        """In its text, and where it was found to begin later than that, what the next token looks at. Of one that was
        preempted, more than a token of its text may be left at its prompt's end: it needs the room for them."""
        sight = self._paging.sight(sequence.num_computed, sequence.num_prompt)
        is_in_prompt = sequence.num_computed + sequence.is_in_its_prompt <= sequence.num_prompt
        has_them = self._paging.first(group, sight) >= sequence.runs[group].first
        return sight if is_in_prompt and has_them else sequence.num_computed

    def _find(self, keys: Iterable[bytes], group: int) -> PageRun:
        keys = list(keys)
        first = self._paging.first(group, len(keys) * self._paging.block_tokens)
        return PageRun(first, tuple(self._pool.match(page_key(key, group) for key in keys[first:])))

    def _extended(self, run: PageRun, count: int) -> PageRun:
        return PageRun(run.first, (*run.blocks, *self._pool.reserve(count))) if count else run
