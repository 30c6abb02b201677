"""Positions of a sequence as KV slots and attention contexts of one group of layers. Numbers only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from weft.kv.layer_groups import PageRange, PagingPolicy

Tables = list[tuple[int, ...]]


def slots(run: PageRange, start: int, end: int, block_tokens: int) -> Iterable[int]:
    """Return the KV slots of consecutive positions."""
    first, last = start // block_tokens, (end - 1) // block_tokens
    if first == last:  # as in nearly all decode steps
        slot = run.blocks[first - run.first] * block_tokens + start % block_tokens
        return range(slot, slot + end - start)
    return _slots_of_blocks(run, start, end, block_tokens)


def _slots_of_blocks(run: PageRange, start: int, end: int, block_tokens: int) -> Iterator[int]:
    for index in range(start // block_tokens, -(-end // block_tokens)):
        shift = (run.blocks[index - run.first] - index) * block_tokens
        yield from range(max(start, index * block_tokens) + shift, min(end, (index + 1) * block_tokens) + shift)


def attention_context(paging: PagingPolicy, group: int, run: PageRange, end: int) -> tuple[int, tuple[int, ...]]:
    """Return length and page table of a context that ends before position `end`.

    It begins at the group's first page or slightly before it. Attention needs only distances between positions, and
    positions relative to aligned chunks, so earlier pages are left out.
    """
    num_skipped = paging.skipped_blocks(group, run.first)
    return end - num_skipped * paging.block_tokens, run.blocks[:1] * (run.first - num_skipped) + run.blocks
