"""Which queries see which keys in a packed batch, and how the torch path groups them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from weft_kernels.layer_cache import PagedPool

# Bytes of keys gathered at a time on a CPU, so that they stay in the second-level cache.
GROUP_BYTES = 1 << 20
MASK_ITEMS = 2 << 20


@dataclass(frozen=True, slots=True)
class KeySpan:
    """Keys up to itself that a query sees: the last `window`, those of its own aligned `chunk`, or all (0)."""

    window: int = 0
    chunk: int = 0

    def first_visible(self, position: int) -> int:
        """Return the first key position that the query at `position` sees."""
        start = position - position % self.chunk if self.chunk else 0
        return max(start, position + 1 - self.window) if self.window else start

    def first_visible_of(self, positions: Tensor) -> Tensor:
        """Return `first_visible` for a tensor of positions."""
        starts = positions - positions % self.chunk if self.chunk else torch.zeros_like(positions)
        return torch.maximum(starts, positions + 1 - self.window) if self.window else starts


FULL = KeySpan()


@dataclass(frozen=True, slots=True)
class GatherGroup:
    """`num_seqs` sequences with equal numbers of consecutive query rows, padded to the most blocks.

    first_row .. end_row: their rows in the packed batch.
    pages: [num_seqs * blocks] int64, of the keys.
    mask: [1, num_seqs, queries * heads / kv_heads, keys], 0 or -inf, added to the scores.
    """

    first_row: int
    end_row: int
    num_seqs: int
    pages: Tensor
    mask: Tensor


@dataclass(frozen=True)
class PagedBatch:
    """S packed sequences: sequence s has rows query_starts[s] .. query_starts[s+1], the last ones of its context.

    context_lens[s] counts all its tokens, these rows included. block_tables[s] covers them and may continue with blocks
    that are not written yet. Single-row sequences of similar length are fastest next to each other.

    decodes[s]: the rows of sequence s are a token and drafts behind it, as opposed to a prompt's. With the C++ kernels
    each of them gives the same bits as in a batch where it is the only row of its sequence. Empty: none decodes.

    first[s]: the first KV slot that rows of sequence s may see, counted like context_lens[s] from the first block of
    its table; None: 0 for all. No row may stand below it: its slot is at least first[s]. Slots below it must hold
    finite numbers, because a kernel may multiply them by 0. Blocks that lie below it as a whole are not read.
    """

    pool: PagedPool
    num_heads: int
    query_starts: Sequence[int]
    context_lens: Sequence[int]
    block_tables: Sequence[Sequence[int]]
    decodes: Sequence[bool] = ()
    first: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if self.first is not None:
            counts = (end - start for start, end in pairwise(self.query_starts))
            bounds = zip(self.first, self.context_lens, counts, strict=True)
            assert all(first <= context - count for first, context, count in bounds)

    def decodes_at(self, index: int) -> bool:
        """Return True if sequence `index` decodes."""
        return bool(self.decodes) and self.decodes[index]

    def first_at(self, index: int) -> int:
        """Return the first slot that rows of sequence `index` may see."""
        return 0 if self.first is None else self.first[index]

    def groups_within(self, span: KeySpan, kv_heads: int, dim: int) -> list[GatherGroup]:
        """Return the groups of a span and a layer's keys, computed once for all such layers."""
        kind = span, kv_heads, dim
        if kind not in self._groups:
            self._groups[kind] = self._make_groups(span, kv_heads, dim)
        return self._groups[kind]

    @cached_property
    def _groups(self) -> dict[tuple[KeySpan, int, int], list[GatherGroup]]:
        return {}

    def _make_groups(self, span: KeySpan, kv_heads: int, dim: int) -> list[GatherGroup]:
        groups: list[GatherGroup] = []
        first, ratio = 0, self.num_heads // kv_heads
        while first < len(self.context_lens):
            end = self._last_of_group(first, kv_heads * dim * self.pool.dtype.itemsize)
            if self._has_one_row(first):
                groups.append(self._decode_group(first, end, span, ratio))
            else:
                groups += self._chunk_groups(first, span, ratio)
            first = end
        return groups

    def scratch(self, count: int) -> Tensor:
        """Return `count` items for the gathered keys and values of one group at a time.

        One memory for the whole batch: fresh memory at every layer costs more in page faults than the gathering itself.
        """
        kept: dict[str, Tensor] = vars(self)
        if "gathered" not in kept or len(kept["gathered"]) < count:
            kept["gathered"] = torch.empty(count, dtype=self.pool.dtype, device=self.pool.device)
        return kept["gathered"][:count]

    def _has_one_row(self, index: int) -> bool:
        return self.query_starts[index + 1] - self.query_starts[index] == 1

    def _last_of_group(self, first: int, token_bytes: int) -> int:
        """Join single-row sequences while padding and gathered bytes stay small."""
        longest = self.context_lens[first]
        end = first + 1
        if not self._has_one_row(first):
            return end
        while end < len(self.context_lens) and self._has_one_row(end):
            longest = max(longest, self.context_lens[end])
            num_bytes = (end + 1 - first) * longest * token_bytes
            if num_bytes > GROUP_BYTES or 2 * self.context_lens[end] < longest:
                break
            end += 1
        return end

    def _decode_group(self, first: int, end: int, span: KeySpan, ratio: int) -> GatherGroup:
        positions = torch.tensor(self.context_lens[first:end])[:, None] - 1
        rows = self.query_starts[first], self.query_starts[end]
        return self._group(rows, range(first, end), positions, span, ratio)

    def _chunk_groups(self, index: int, span: KeySpan, ratio: int) -> list[GatherGroup]:
        """Split a chunk: the mask stays bounded, and early rows skip keys that they cannot see."""
        start, end = self.query_starts[index], self.query_starts[index + 1]
        context = self.context_lens[index]
        size = max(16, MASK_ITEMS // (context * ratio))
        groups = []
        for row in range(start, end, size):
            last = min(row + size, end)
            positions = torch.arange(context - (end - row), context - (end - last))
            groups.append(self._group((row, last), range(index, index + 1), positions[None], span, ratio))
        return groups

    def _group(
        self, rows: tuple[int, int], indices: range, positions: Tensor, span: KeySpan, ratio: int
    ) -> GatherGroup:
        """Build a group from positions [num_seqs, queries]."""
        block_tokens = self.pool.block_tokens
        firsts = span.first_visible_of(positions)
        if self.first is not None:
            firsts = torch.maximum(firsts, torch.tensor([self.first[index] for index in indices])[:, None])
        starts = firsts.min(1).values // block_tokens
        counts = positions.max(1).values // block_tokens + 1 - starts
        num_blocks = int(counts.max())
        # Padding repeats a sequence's own block: even under a mask, only numbers that it wrote itself are read.
        tables = [
            list(self.block_tables[index][start : start + count])
            + [self.block_tables[index][start]] * (num_blocks - count)
            for index, start, count in zip(indices, starts.tolist(), counts.tolist(), strict=True)
        ]
        mask = self._mask(positions, firsts, starts * block_tokens, num_blocks * block_tokens)
        # Heads that share keys are further queries.
        mask = mask.repeat_interleave(ratio, dim=1)[None]
        device = self.pool.device
        return GatherGroup(*rows, len(indices), torch.tensor(tables).flatten().to(device), mask.to(device))

    def _mask(self, positions: Tensor, firsts: Tensor, starts: Tensor, num_keys: int) -> Tensor:
        """Return the mask [num_seqs, queries, keys]; gathered keys start at `starts`."""
        keys = starts[:, None, None] + torch.arange(num_keys)
        is_hidden = (keys > positions[..., None]) | (keys < firsts[..., None])
        return torch.zeros(is_hidden.shape, dtype=self.pool.dtype).masked_fill_(is_hidden, float("-inf"))
