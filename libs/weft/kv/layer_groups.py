"""Which pages of a sequence are needed: layers that look equally far back form groups, each with a block table.

A page holds one block of tokens for one group's layers. Knows numbers, no pool, no bytes and no sequences.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd

from weft.kv.block_keys import reusable_blocks


@dataclass(frozen=True, slots=True)
class AttentionSpan:
    """How far back a token looks: at the last `window` tokens, those of its own aligned `chunk`, or all (both 0)."""

    window: int = 0
    chunk: int = 0

    @property
    def width(self) -> int:
        """Tokens that one sees at most, itself included; 0: all."""
        return min(self.window, self.chunk) if self.window and self.chunk else self.window or self.chunk

    def first(self, position: int) -> int:
        """The first token that the one at `position`, or any behind it, looks at; up to `position` itself."""
        start = position - position % self.chunk if self.chunk else 0
        return max(start, position + 1 - self.window) if self.window else start


@dataclass(frozen=True, slots=True)
class PageRange:
    """One group's pages of a sequence: those of its blocks `first`, `first` + 1, ..."""

    first: int
    blocks: tuple[int, ...]

    @property
    def end(self) -> int:
        """The first block behind."""
        return self.first + len(self.blocks)

    def page(self, index: int) -> int | None:
        """That of block `index`, if there is one."""
        return self.blocks[index - self.first] if self.first <= index < self.end else None

    def within(self, first: int, end: int) -> PageRange:
        """What it has of these blocks; `first` may lie before the run."""
        first = max(first, self.first)
        return PageRange(first, self.blocks[first - self.first : max(0, end - self.first)])


@dataclass(frozen=True, slots=True)
class PagingPolicy:
    """A model's groups, `block_tokens` to a page, and steps of at most `chunk_tokens` of one sequence.

    A group that sees everything has a run from block 0 on. Another one has what the next token sees and what the next
    step writes: pages that nobody looks at any more go back.
    """

    spans: tuple[AttentionSpan, ...]
    block_tokens: int
    chunk_tokens: int

    @property
    def is_bounded(self) -> bool:
        """Some group gives pages back before the sequence ends."""
        return any(reach.width for reach in self.spans)

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that so many tokens take."""
        return -(-num_tokens // self.block_tokens)

    def first(self, group: int, num_tokens: int) -> int:
        """The first block that a group still needs once the KV of `num_tokens` tokens is there."""
        return self.spans[group].first(num_tokens) // self.block_tokens

    def max_pages_per_step(self, group: int) -> int:
        """Pages with which a group can always take the next step, wherever in a block it begins; 0: no limit."""
        width = self.spans[group].width
        # and, see `sight`, a whole block behind a prompt's last step
        return self._spanned(group, width - 1 + max(self.chunk_tokens, self.block_tokens)) if width else 0

    def num_new_pages(self, group: int, num_hit: int, num_blocks: int) -> int:
        """Pages to be had behind `num_hit` found blocks before a sequence of so many may start.

        Found pages do not count: they may be others' as well, and then giving them back makes no room.
        """
        return min(num_blocks - num_hit, self.max_pages_per_step(group) or num_blocks)

    def max_pages_decoding(self, group: int) -> int:
        """Pages of a group while tokens are generated one by one; 0: no limit."""
        width = self.spans[group].width
        return self._spanned(group, width) if width else 0

    def num_pages(self, num_tokens: int) -> int:
        """What a sequence of so many tokens takes while it generates, in all groups together."""
        total = self.num_blocks(num_tokens)
        return sum(min(total, self.max_pages_decoding(group) or total) for group in range(len(self.spans)))

    def max_pages(self, num_tokens: int) -> int:
        """What a sequence of so many tokens takes at any time of its life: as a prompt, found pages beside new ones."""
        return sum(self._max_held(group, num_tokens) for group in range(len(self.spans)))

    def table_widths(self, num_tokens: int) -> list[int]:
        """Of each group, entries of such a sequence's block table at most: its pages behind those not left out."""
        total = self.num_blocks(num_tokens)
        periods = [reach.chunk // gcd(reach.chunk, self.block_tokens) if reach.chunk else 1 for reach in self.spans]
        return [min(total, self._max_held(group, num_tokens) + each - 1) for group, each in enumerate(periods)]

    def max_sequence_tokens(self, num_pages: int, max_tokens: int) -> int:
        """Tokens of the longest sequence that so many pages can take through its life, `max_tokens` at most."""
        counts = range(0, max_tokens + self.block_tokens, self.block_tokens)
        return min(max_tokens, counts[bisect_right(counts, num_pages, key=self.max_pages) - 1])

    def retention_point(self, num_ready: int, num_prompt: int) -> int:
        """The tokens behind which pages of a prompt may go once `num_ready` of it have their KV.

        At its end fewer than those: whoever asks for the same prompt again goes on from its last reusable block, and
        what is looked at from there is to be found.
        """
        return min(num_ready, reusable_blocks(num_prompt, self.block_tokens) * self.block_tokens)

    def remap(self, group: int, run: PageRange, num_fixed: int, sight: int) -> PageRange:
        """What becomes of a run whose pages may go as far as is out of `sight`.

        Pages before block `num_fixed` stay where they are. Those behind have nothing in them yet: where the next token
        looks at none of the others, they begin at the first block that it looks at.
        """
        first = self.first(group, sight)
        return PageRange(first, run.blocks[min(first, num_fixed) - run.first :])

    def needed_blocks(self, group: int, num_held: int, num_ready: int, num_prompt: int) -> range:
        """Blocks that somebody with the first `num_held` of a prompt needs of another's KV of `num_ready` tokens."""
        return range(
            max(self.first(group, self.retention_point(num_ready, num_prompt)), num_held), self.num_blocks(num_ready)
        )

    def longest_prefix_hit(self, keys: Sequence[bytes], is_known: Callable[[bytes], bool]) -> int:
        """Blocks of the longest prefix that can be gone on from: each group has all pages that the next token sees."""
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
        """Of the blocks before a run, those that attention need not count: without them no chunk's edge moves."""
        chunk = self.spans[group].chunk
        return first - first % (chunk // gcd(chunk, self.block_tokens)) if chunk else first

    def _max_held(self, group: int, num_tokens: int) -> int:
        total, width = self.num_blocks(num_tokens), self.spans[group].width
        return min(total, self._spanned(group, width - 1) + self.max_pages_per_step(group)) if width else total

    def _prefix_without_gap(self, keys: Sequence[bytes], is_known: Callable[[bytes], bool], num_blocks: int) -> int:
        """`num_blocks`, or, where a page is missing, the longest prefix for which that one is not looked at."""
        for group, reach in enumerate(self.spans):
            if reach.width:
                needed = range(self.first(group, num_blocks * self.block_tokens), num_blocks)
                lacking = (at for at in reversed(needed) if not is_known(page_key(keys[at], group)))
                num_blocks = next(lacking, num_blocks)
        return num_blocks

    def _spanned(self, group: int, num_tokens: int) -> int:
        """Blocks that so many tokens in a row touch at most, where the first one may be the first that is seen."""
        reach = self.spans[group]
        latest = self.block_tokens - (1 if reach.window else gcd(reach.chunk, self.block_tokens))
        return (latest + num_tokens - 1) // self.block_tokens + 1


def page_key(key: bytes, group: int) -> bytes:
    """The key of one group's page; the first group's is the block's own."""
    return key + group.to_bytes(2, "little") if group else key
