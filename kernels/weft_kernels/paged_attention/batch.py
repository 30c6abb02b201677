"""Which queries see which keys in one packed batch, and how the torch path cuts that into even pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

# Keys gathered at a time on a CPU: what its second-level cache still holds is read again for free.
GROUP_BYTES = 1 << 20
MASK_ITEMS = 2 << 20


@dataclass(frozen=True, slots=True)
class Group:
    """`num_seqs` sequences with the same number of consecutive query rows each, padded to the longest context.

    first_row .. end_row: their rows in the packed batch.
    key_rows: [kv_heads * num_seqs * blocks], rows of the keys of layer 0 in the pool seen as [-1, block_tokens * dim].
    mask: [1, num_seqs, queries * heads / kv_heads, keys], 0 or -inf, to be added to the scores.
    """

    first_row: int
    end_row: int
    num_seqs: int
    key_rows: Tensor
    mask: Tensor


@dataclass(frozen=True)
class PagedBatch:
    """S sequences, packed: sequence s has rows query_starts[s] .. query_starts[s+1], the last of its context.

    context_lens[s] counts all its tokens up to its last row, these rows included; block_tables[s] covers them,
    and may go on with blocks that are not written yet.
    `pool` [blocks, kv_heads, layers, 2, block_tokens, dim] is contiguous. Sequences of one row and like length are
    fastest when they are neighbours.
    """

    pool: Tensor
    num_heads: int
    query_starts: Sequence[int]
    context_lens: Sequence[int]
    block_tables: Sequence[Sequence[int]]

    @cached_property
    def groups(self) -> list[Group]:
        """Made once, used by every layer."""
        groups: list[Group] = []
        first = 0
        while first < len(self.context_lens):
            end = self._last_of_group(first)
            groups += [self._decode_group(first, end)] if self._is_decode(first) else self._chunk_groups(first)
            first = end
        return groups

    @cached_property
    def scratch(self) -> Tensor:
        """[2, runs, block_tokens * dim]: gathered keys and values of one group at a time.

        One for the whole batch: fresh memory at every layer costs more in page faults than the gathering itself.
        """
        num_runs = max(len(group.key_rows) for group in self.groups)
        return self.pool.new_empty(2, num_runs, self.pool.shape[4] * self.pool.shape[5])

    def _is_decode(self, index: int) -> bool:
        return self.query_starts[index + 1] - self.query_starts[index] == 1

    def _last_of_group(self, first: int) -> int:
        """Join single-row sequences while padding and gathered bytes stay small."""
        longest = self.context_lens[first]
        end = first + 1
        if not self._is_decode(first):
            return end
        _, kv_heads, _, _, _, dim = self.pool.shape
        is_unbounded = self.pool.is_cuda
        while end < len(self.context_lens) and self._is_decode(end):
            longest = max(longest, self.context_lens[end])
            num_bytes = (end + 1 - first) * longest * kv_heads * dim * self.pool.itemsize
            if not is_unbounded and (num_bytes > GROUP_BYTES or 2 * self.context_lens[end] < longest):
                break
            end += 1
        return end

    def _decode_group(self, first: int, end: int) -> Group:
        lens = torch.tensor(self.context_lens[first:end])
        visible = lens[:, None].expand(-1, self.num_heads // self.pool.shape[1])
        return self._group(self.query_starts[first], self.query_starts[end], list(range(first, end)), visible)

    def _chunk_groups(self, index: int) -> list[Group]:
        """A chunk in pieces: the mask stays bounded, and early rows do not read keys that they cannot see."""
        start, end = self.query_starts[index], self.query_starts[index + 1]
        context, ratio = self.context_lens[index], self.num_heads // self.pool.shape[1]
        size = max(16, MASK_ITEMS // (context * ratio))
        groups = []
        for row in range(start, end, size):
            last = min(row + size, end)
            visible = torch.arange(context - (end - row) + 1, context - (end - last) + 1).repeat_interleave(ratio)
            groups.append(self._group(row, last, [index], visible[None]))
        return groups

    def _group(self, first_row: int, end_row: int, indices: list[int], visible: Tensor) -> Group:
        """visible: [num_seqs, queries * ratio], how many leading keys each query sees."""
        _, kv_heads, layers, _, block_tokens, _ = self.pool.shape
        num_blocks = -(-int(visible.max()) // block_tokens)
        # Padding repeats a sequence's own first block: even under a mask, only numbers that it wrote itself are read.
        own = [min(num_blocks, -(-self.context_lens[i] // block_tokens)) for i in indices]
        tables = [list(self.block_tables[i][:count]) for i, count in zip(indices, own, strict=True)]
        tables = [table + table[:1] * (num_blocks - len(table)) for table in tables]
        heads = torch.arange(kv_heads)[:, None, None]
        key_rows = ((torch.tensor(tables) * kv_heads + heads) * (layers * 2)).flatten()
        mask = torch.zeros(1, *visible.shape, num_blocks * block_tokens, dtype=self.pool.dtype)
        mask.masked_fill_(torch.arange(mask.shape[-1]) >= visible[..., None], float("-inf"))
        device = self.pool.device
        return Group(first_row, end_row, len(indices), key_rows.to(device), mask.to(device))
