"""Paging of layer groups: which pages of a sequence each group needs.

Layers with the same attention span form a group with its own block table. A page holds one block of tokens for one
group's layers. Pure arithmetic.

Over tensor-parallel ranks: a block's outermost dimension is the key head, so a rank holds one contiguous range. With
more ranks than heads, neighbouring ranks hold the same head. `rank_copies` pulls between sides of different degree.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd

from weft.kv.block_pool import page_key, reusable_blocks


@dataclass(frozen=True, slots=True)
class AttentionSpan:
    """How far back a token attends: the last `window` tokens, its own aligned `chunk`, or everything (both 0)."""

    window: int = 0
    chunk: int = 0

    @property
    def width(self) -> int:
        """Maximum number of visible tokens, including the token itself; 0 means all."""
        return min(self.window, self.chunk) if self.window and self.chunk else self.window or self.chunk

    def first(self, position: int) -> int:
        """Return the first token visible to `position` or any later token; at most `position`."""
        start = position - position % self.chunk if self.chunk else 0
        return max(start, position + 1 - self.window) if self.window else start


@dataclass(frozen=True, slots=True)
class Unit:
    """A part of a page: `size` bytes from `offset` on. `number` is unique in the model."""

    offset: int
    size: int
    number: int


@dataclass(frozen=True, slots=True)
class PageRange:
    """Pages of one group of a sequence, for its blocks `first`, `first` + 1, ..."""

    first: int
    blocks: tuple[int, ...]

    @property
    def end(self) -> int:
        """The block after the last one."""
        return self.first + len(self.blocks)

    def page(self, index: int) -> int | None:
        """Return the page of block `index`, or None."""
        return self.blocks[index - self.first] if self.first <= index < self.end else None

    def within(self, first: int, end: int) -> PageRange:
        """Return the part for blocks `first` to `end`; `first` may lie before the range."""
        first = max(first, self.first)
        return PageRange(first, self.blocks[first - self.first : max(0, end - self.first)])


@dataclass(frozen=True, slots=True)
class PagingPolicy:
    """A model's layer groups, with `block_tokens` a page and steps of at most `chunk_tokens` of one sequence.

    A group that sees everything has pages from block 0 on. Any other group holds the pages that the next token sees and
    the next step writes; earlier pages are freed.

    `draft_group`: the group with a draft model's layer; None without one.
    """

    spans: tuple[AttentionSpan, ...]
    block_tokens: int
    chunk_tokens: int
    draft_group: int | None = None

    @property
    def num_repeated(self) -> int:
        """Tokens before the next one that a step may compute once more; it needs what they see.

        A draft model needs the state of the last token, which no cache holds.
        """
        return int(self.draft_group is not None)

    @property
    def is_bounded(self) -> bool:
        """True if a group frees pages before the sequence ends."""
        return any(reach.width for reach in self.spans)

    def num_blocks(self, num_tokens: int) -> int:
        """Return the number of blocks of `num_tokens` tokens."""
        return -(-num_tokens // self.block_tokens)

    def first(self, group: int, num_tokens: int) -> int:
        """Return the first block that a group still needs once the KV of `num_tokens` tokens exists."""
        return self.spans[group].first(max(0, num_tokens - self.num_repeated)) // self.block_tokens

    def max_pages_per_step(self, group: int) -> int:
        """Return the pages with which a group can run any step, wherever it starts in a block; 0 means no limit."""
        width = self._width(group)
        # Includes a whole block after a prompt's last step, see `retention_point`.
        return self._spanned(group, width - 1 + max(self.chunk_tokens, self.block_tokens)) if width else 0

    def num_new_pages(self, group: int, num_hit: int, num_blocks: int) -> int:
        """Return the new pages needed after `num_hit` found blocks before a sequence of `num_blocks` may start.

        Found pages do not count: other sequences may share them, so freeing them makes no room.
        """
        return min(num_blocks - num_hit, self.max_pages_per_step(group) or num_blocks)

    def max_pages_decoding(self, group: int) -> int:
        """Return the maximum pages of a group while decoding; 0 means no limit."""
        width = self._width(group)
        return self._spanned(group, width) if width else 0

    def num_pages(self, num_tokens: int) -> int:
        """Return the pages of a decoding sequence of `num_tokens` tokens, over all groups."""
        total = self.num_blocks(num_tokens)
        return sum(min(total, self.max_pages_decoding(group) or total) for group in range(len(self.spans)))

    def max_pages(self, num_tokens: int) -> int:
        """Return the maximum pages of a sequence at any time, including found pages of a prompt."""
        return sum(self._max_held(group, num_tokens) for group in range(len(self.spans)))

    def table_widths(self, num_tokens: int) -> list[int]:
        """Return for each group the maximum block table entries of such a sequence, without skipped blocks."""
        total = self.num_blocks(num_tokens)
        periods = [reach.chunk // gcd(reach.chunk, self.block_tokens) if reach.chunk else 1 for reach in self.spans]
        return [min(total, self._max_held(group, num_tokens) + each - 1) for group, each in enumerate(periods)]

    def max_sequence_tokens(self, num_pages: int, max_tokens: int) -> int:
        """Return the longest sequence, up to `max_tokens`, that fits into `num_pages` at all times."""
        counts = range(0, max_tokens + self.block_tokens, self.block_tokens)
        return min(max_tokens, counts[bisect_right(counts, num_pages, key=self.max_pages) - 1])

    def retention_point(self, num_ready: int, num_prompt: int) -> int:
        """Return the token before which a prompt's pages may be freed once `num_ready` tokens have KV.

        At the prompt's end this lies earlier: a repetition of the prompt continues from its last reusable block, and
        must find the pages visible from there.
        """
        return min(num_ready, reusable_blocks(num_prompt, self.block_tokens) * self.block_tokens)

    def remap(self, group: int, run: PageRange, num_fixed: int, retention_point: int) -> PageRange:
        """Drop the pages that no later token attends to, and remap the rest.

        Pages before block `num_fixed` keep their place. Later pages are still empty: if the next token sees none of the
        fixed ones, they start at the first block that it sees.
        """
        first = self.first(group, retention_point)
        return PageRange(first, run.blocks[min(first, num_fixed) - run.first :])

    def needed_blocks(self, group: int, num_held: int, num_ready: int, num_prompt: int) -> range:
        """Return the blocks that a holder of the first `num_held` blocks needs of a peer's KV of `num_ready` tokens."""
        return range(
            max(self.first(group, self.retention_point(num_ready, num_prompt)), num_held), self.num_blocks(num_ready)
        )

    def longest_prefix_hit(self, keys: Sequence[bytes], is_known: Callable[[bytes], bool]) -> int:
        """Return the longest prefix, in blocks, that can be continued: each group has all pages visible to the next
        token.
        """
        num_blocks = len(keys)
        for group, reach in enumerate(self.spans):
            if not reach.width:
                lacking = (at for at in range(num_blocks) if not is_known(page_key(keys[at], group)))
                num_blocks = next(lacking, num_blocks)
        shorter = self._prefix_without_gap(keys, is_known, num_blocks)
        while shorter < num_blocks:
            num_blocks, shorter = shorter, self._prefix_without_gap(keys, is_known, shorter)
        return num_blocks

    def skipped_blocks(self, group: int, first: int) -> int:
        """Return the blocks before a range that attention need not count: skipping them moves no chunk boundary."""
        chunk = self.spans[group].chunk
        return first - first % (chunk // gcd(chunk, self.block_tokens)) if chunk else first

    def _width(self, group: int) -> int:
        """Return the maximum tokens that a step sees before and with its first new one; 0 means all."""
        width = self.spans[group].width
        return width + self.num_repeated if width else 0

    def _max_held(self, group: int, num_tokens: int) -> int:
        total, width = self.num_blocks(num_tokens), self._width(group)
        return min(total, self._spanned(group, width - 1) + self.max_pages_per_step(group)) if width else total

    def _prefix_without_gap(self, keys: Sequence[bytes], is_known: Callable[[bytes], bool], num_blocks: int) -> int:
        """Return `num_blocks`, or the longest prefix from which a missing page is not visible."""
        for group, reach in enumerate(self.spans):
            if reach.width:
                needed = range(self.first(group, num_blocks * self.block_tokens), num_blocks)
                lacking = (at for at in reversed(needed) if not is_known(page_key(keys[at], group)))
                num_blocks = next(lacking, num_blocks)
        return num_blocks

    def _spanned(self, group: int, num_tokens: int) -> int:
        """Return the maximum blocks that `num_tokens` consecutive tokens touch if the first may be the first visible
        one.
        """
        reach = self.spans[group]
        latest = self.block_tokens - (1 if reach.window else gcd(reach.chunk, self.block_tokens))
        return (latest + num_tokens - 1) // self.block_tokens + 1


@dataclass(frozen=True, slots=True)
class HeadRange:
    """Key heads `first` ... `first` + `count` - 1 of every block."""

    first: int
    count: int

    @property
    def end(self) -> int:
        """The head after the last one."""
        return self.first + self.count


@dataclass(frozen=True, slots=True)
class RankCopy:
    """Bytes of one block: from `source_offset` of the source rank's part to `offset` of ours."""

    source_rank: int
    source_offset: int
    offset: int
    size_bytes: int


def head_range(num_heads: int, degree: int, rank: int) -> HeadRange:
    """Return a rank's heads. Raises ValueError unless heads and ranks divide evenly."""
    if not 0 <= rank < degree:
        raise ValueError(f"no rank {rank} of {degree}")
    if max(num_heads, degree) % min(num_heads, degree):
        raise ValueError(f"{num_heads} key heads cannot be shared by {degree} ranks")
    if degree <= num_heads:
        count = num_heads // degree
        return HeadRange(rank * count, count)
    return HeadRange(rank // (degree // num_heads), 1)


def rank_copies(num_heads: int, head_bytes: int, source_degree: int, degree: int, rank: int) -> tuple[RankCopy, ...]:
    """Return what `rank` of `degree` pulls of each block, in order and in as few copies as possible.

    If several source ranks hold a head, each puller uses another one.
    """
    own = head_range(num_heads, degree, rank)
    num_copies = max(1, source_degree // num_heads)
    runs = []
    for source_rank in range(rank % num_copies, source_degree, num_copies):
        source = head_range(num_heads, source_degree, source_rank)
        first, end = max(own.first, source.first), min(own.end, source.end)
        if first < end:
            offsets = [(first - side.first) * head_bytes for side in (source, own)]
            runs.append(RankCopy(source_rank, offsets[0], offsets[1], (end - first) * head_bytes))
    return tuple(runs)
