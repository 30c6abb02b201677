"""Page tables of sequences, one for each group of layers: prefix matching, allocation, release behind windows.

Pure bookkeeping on sequences and block numbers: no tensors, no scheduling.
"""

from __future__ import annotations

from typing import NamedTuple

from weft.engine.sequence import Sequence
from weft.kv.block_pool import BlockPool, PoolExhausted, bare_key, page_key
from weft.kv.layer_groups import PageRange, PagingPolicy


class PrefixHit(NamedTuple):
    """Cached blocks of a prompt's beginning. `num_bare`: those before the last one without draft KV, and that one."""

    num_blocks: int
    num_bare: int


class BlockTables:
    """Changes `page_ranges` of sequences, and no other field."""

    def __init__(self, paging: PagingPolicy, pool: BlockPool) -> None:
        self._paging = paging
        self._pool = pool
        self._groups = range(len(paging.spans))
        self._bounded = [group for group in self._groups if paging.spans[group].width]

    def allocate_prompt(self, sequence: Sequence, num_growing: int) -> PrefixHit | None:
        """Give a sequence its first pages, cached ones first. Returns the cached blocks of its prefix.

        A bare page is taken where the plain one is not cached. Returns None if the pool has too few pages. One page of
        each group stays free for each of `num_growing` sequences.
        """
        paging, size = self._paging, self._paging.block_tokens
        keys = sequence.reusable_keys(size)
        num_hit = paging.longest_prefix_hit(keys, self._is_cached)
        names = [self._names(keys[:num_hit], group) for group in self._groups]
        hits = [PageRange(num_hit - len(each), tuple(self._pool.match(each))) for each in names]
        num_blocks = paging.num_blocks(len(sequence.token_ids))
        wanted = [paging.num_new_pages(group, num_hit, num_blocks) for group in self._groups]
        if sum(wanted) + num_growing * len(wanted) > self._pool.num_available:
            for run in hits:
                self._pool.release(run.blocks)
            return None
        sequence.page_ranges = [self._extend(*each) for each in zip(hits, wanted, strict=True)]
        return PrefixHit(num_hit, self._num_bare(keys[:num_hit], names))

    def num_prompt_blocks(self, sequence: Sequence, num_growing: int) -> int:
        """Return the pages that `allocate_prompt` needs if none are cached."""
        num_blocks = self._paging.num_blocks(len(sequence.token_ids))
        return sum([self._paging.num_new_pages(group, 0, num_blocks) + num_growing for group in self._groups])

    def num_missing_blocks(self, sequence: Sequence, num_drafts: int = 0) -> int:
        """Return the pages that its next token and `num_drafts` drafts need beyond those it has."""
        num_blocks = self._paging.num_blocks(sequence.num_tokens + num_drafts)
        return sum([num_blocks - run.end for run in sequence.page_ranges])

    def append_blocks(self, sequence: Sequence, num_drafts: int = 0) -> None:
        """Append the pages of its next token and `num_drafts` drafts; they must be available."""
        num_blocks = self._paging.num_blocks(sequence.num_tokens + num_drafts)
        for group, run in enumerate(sequence.page_ranges):
            if num_blocks > run.end:
                sequence.page_ranges[group] = self._extend(run, num_blocks - run.end)

    def release_out_of_window(self, sequence: Sequence) -> None:
        """After a step, release pages that no later token can see, and allocate pages for the rest of the prompt.

        A step in flight is later, so it sees no page that is released here.
        """
        for group in self._bounded:
            run = sequence.page_ranges[group]
            is_short = run.end < self._paging.num_blocks(sequence.num_tokens)
            if is_short or self._paging.first(group, self._visible_from(sequence, group)) > run.first:
                self._shift_window(sequence, group, run.end)

    def release_unused(self, sequence: Sequence, num_drafts: int = 0) -> None:
        """Release the pages behind the last token and `num_drafts` drafts, which no other draft needs any more."""
        num_blocks = self._paging.num_blocks(sequence.num_tokens + num_drafts)
        for group, run in enumerate(sequence.page_ranges):
            if run.end > num_blocks:
                self._pool.release(run.within(num_blocks, run.end).blocks)
                sequence.page_ranges[group] = run.within(run.first, num_blocks)

    def map_received(self, sequence: Sequence, num_hit: int) -> None:
        """After received KV, map the pages behind the `num_hit` cached blocks to the positions that they hold."""
        for group in self._bounded:
            self._shift_window(sequence, group, num_hit)

    def capacity_tokens(self, sequence: Sequence) -> int:
        """Return the tokens that have pages in all groups. It is less than a chunk if the pool lacks pages."""
        return min([run.end for run in sequence.page_ranges]) * self._paging.block_tokens

    def replace_suspect_blocks(self, sequence: Sequence, suspect: set[int]) -> bool:
        """Quarantine and replace suspect pages. Returns False, with all pages released, if the pool lacks others."""
        self._pool.quarantine(suspect)
        try:
            fresh = iter(self._pool.reserve(len(suspect)))
        except PoolExhausted:
            for run in sequence.page_ranges:
                self._pool.release([block for block in run.blocks if block not in suspect])
            sequence.page_ranges = []
            return False
        sequence.page_ranges = [
            PageRange(run.first, tuple(next(fresh) if block in suspect else block for block in run.blocks))
            for run in sequence.page_ranges
        ]
        return True

    def release(self, sequence: Sequence) -> None:
        """Release all pages of a sequence."""
        for run in sequence.page_ranges:
            self._pool.release(run.blocks)
        sequence.page_ranges = []

    def _shift_window(self, sequence: Sequence, group: int, num_fixed: int) -> None:
        paging, run = self._paging, sequence.page_ranges[group]
        num_blocks = paging.num_blocks(sequence.num_tokens)
        kept = paging.remap(group, run, num_fixed, self._visible_from(sequence, group))
        num_left = len(run.blocks) - len(kept.blocks)
        self._pool.release(run.blocks[:num_left])
        if kept.end > num_blocks:
            self._pool.release(kept.within(num_blocks, kept.end).blocks)
            kept = kept.within(kept.first, num_blocks)
        wanted = min(num_blocks, kept.first + paging.max_pages_per_step(group)) - kept.end
        sequence.page_ranges[group] = self._extend(kept, min(max(0, wanted), self._pool.num_available))

    def _visible_from(self, sequence: Sequence, group: int) -> int:
        """Return the position up to which earlier pages may be released.

        Inside the prompt it is the retention point. While decoding, and if the cached pages begin later than that, it
        is what the next token sees. A preempted sequence may have more than one generated token to recompute at its
        prompt's end, and needs the pages for them.
        """
        sight = self._paging.retention_point(sequence.num_computed, sequence.num_prompt)
        is_in_prompt = sequence.num_computed + sequence.is_prefilling <= sequence.num_prompt
        has_them = self._paging.first(group, sight) >= sequence.page_ranges[group].first
        return sight if is_in_prompt and has_them else sequence.num_computed

    def _is_cached(self, page: bytes) -> bool:
        return self._pool.is_known(page) or self._pool.is_known(bare_key(page))

    def _names(self, keys: list[bytes], group: int) -> list[bytes]:
        """Return the keys of the cached pages that a sequence needs behind these blocks."""
        first = self._paging.first(group, len(keys) * self._paging.block_tokens)
        pages = [page_key(key, group) for key in keys[first:]]
        if group != self._paging.draft_group:
            return pages
        return [page if self._pool.is_known(page) else bare_key(page) for page in pages]

    def _num_bare(self, keys: list[bytes], names: list[list[bytes]]) -> int:
        group = self._paging.draft_group
        if group is None:
            return 0
        last_bare = (at for at in range(len(names[group])) if names[group][-1 - at] != page_key(keys[-1 - at], group))
        return len(keys) - next(last_bare, len(keys))

    def _extend(self, run: PageRange, count: int) -> PageRange:
        return PageRange(run.first, (*run.blocks, *self._pool.reserve(count))) if count else run
