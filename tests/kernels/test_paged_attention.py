"""The grouped torch path gives what the reference defines, whatever the batch looks like."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, islice, pairwise

import pytest
import torch

from weft_kernels.layer_cache import uniform_pool
from weft_kernels.native import CHOICE
from weft_kernels.paged_attention import FULL, KeySpan, PagedBatch, paged_attention, paged_attention_reference

BLOCK_TOKENS, NUM_LAYERS, NUM_BLOCKS = 4, 2, 40

# (new rows, context with them) of each sequence
BATCHES = {
    "one token": [(1, 1)],
    "a full block": [(1, 4)],
    "decodes of all lengths": [(1, 23), (1, 9), (1, 8), (1, 1)],
    "a whole prompt": [(11, 11)],
    "a chunk after others": [(5, 14)],
    "decodes and chunks": [(1, 17), (1, 3), (6, 6), (4, 12), (1, 5)],
}


@pytest.fixture(autouse=True)
def use_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of machines without the C++ kernels."""
    monkeypatch.setenv(CHOICE, "torch")


def make_batch(
    spans: list[tuple[int, int]],
    heads: tuple[int, int],
    dim: int,
    dtype: torch.dtype,
    num_blocks: int = NUM_BLOCKS,
) -> tuple[torch.Tensor, PagedBatch]:
    """Random queries and keys; block tables in no particular order."""
    generator = torch.Generator().manual_seed(3)
    num_heads, kv_heads = heads
    pool = torch.randn(num_blocks, kv_heads, NUM_LAYERS, 2, BLOCK_TOKENS, dim, generator=generator).to(dtype)
    free = torch.randperm(num_blocks, generator=generator).tolist()
    tables = [[free.pop() for _ in range(-(-context // BLOCK_TOKENS))] for _, context in spans]
    starts = [sum(rows for rows, _ in spans[:i]) for i in range(len(spans) + 1)]
    q = torch.randn(starts[-1], num_heads, dim, generator=generator).to(dtype)
    return q, PagedBatch(uniform_pool(pool), num_heads, starts, [context for _, context in spans], tables)


def hide(batch: PagedBatch, share: float) -> PagedBatch:
    """Hide `share` of the slots in front of the rows of each sequence, and fill the blocks that lose all with NaN."""
    counts = [end - start for start, end in pairwise(batch.query_starts)]
    bounds = zip(batch.context_lens, counts, strict=True)
    first = [round((context - count) * share) for context, count in bounds]
    for table, bound in zip(batch.block_tables, first, strict=True):
        batch.pool.memory[list(table[: bound // batch.pool.block_tokens])] = float("nan")
    return replace(batch, first=first)


def shifted(batch: PagedBatch) -> PagedBatch:
    """Copy visible slots of a batch with FULL spans to the front of blocks of their own: it needs no `first`."""
    assert batch.first is not None
    pool, size = batch.pool.memory, batch.pool.block_tokens
    moved, tables, lens = [], list[list[int]](), []
    for first, context, table in zip(batch.first, batch.context_lens, batch.block_tables, strict=True):
        lens.append(context - first)
        places = list(islice(cycle(range(first, context)), -(-lens[-1] // size) * size))
        seen = [pool[table[place // size], ..., place % size, :] for place in places]
        moved += [torch.stack(seen[at : at + size], dim=-2) for at in range(0, len(seen), size)]
        tables.append(list(range(len(moved) - len(seen) // size, len(moved))))
    own = uniform_pool(torch.stack(moved).contiguous())
    return PagedBatch(own, batch.num_heads, batch.query_starts, lens, tables, batch.decodes)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("spans", BATCHES.values(), ids=BATCHES)
def test_grouped_attention_is_the_reference_in_fp32(spans: list[tuple[int, int]], heads: tuple[int, int]) -> None:
    q, batch = make_batch(spans, heads, 10, torch.float32)
    for layer in range(NUM_LAYERS):
        torch.testing.assert_close(
            paged_attention(q, layer, batch), paged_attention_reference(q, layer, batch), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize(
    "span",
    [KeySpan(1), KeySpan(4), KeySpan(6), KeySpan(100), KeySpan(0, 4), KeySpan(0, 5), KeySpan(0, 100), KeySpan(3, 8)],
)
@pytest.mark.parametrize("spans", BATCHES.values(), ids=BATCHES)
def test_windows_and_chunks_are_those_of_the_reference(spans: list[tuple[int, int]], span: KeySpan) -> None:
    q, batch = make_batch(spans, (4, 2), 8, torch.float32)
    torch.testing.assert_close(
        paged_attention(q, 1, batch, span), paged_attention_reference(q, 1, batch, span), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(
        paged_attention(q, 0, batch), paged_attention_reference(q, 0, batch), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("span", [KeySpan(), KeySpan(6)])
@pytest.mark.parametrize("spans", BATCHES.values(), ids=BATCHES)
def test_sinks_are_those_of_the_reference(spans: list[tuple[int, int]], span: KeySpan, dtype: torch.dtype) -> None:
    q, batch = make_batch(spans, (6, 2), 8, dtype)
    sinks = torch.tensor([-3.0, 0.5, 1.0, 1.5, 2.0, 6.0])
    expected = paged_attention_reference(q, 1, batch, span, sinks)
    rtol, atol = (1e-5, 1e-6) if dtype == torch.float32 else (2e-2, 2e-2)
    torch.testing.assert_close(paged_attention(q, 1, batch, span, sinks=sinks), expected, rtol=rtol, atol=atol)


def test_blocks_before_the_window_are_not_read() -> None:
    q, batch = make_batch([(1, 30), (1, 23), (2, 17)], (4, 2), 8, torch.float32)
    expected = paged_attention(q, 0, batch, KeySpan(5))
    batch.pool.memory[[block for table in batch.block_tables for block in table[:2]]] = float("nan")
    assert torch.equal(paged_attention(q, 0, batch, KeySpan(5)), expected)


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("span", [FULL, KeySpan(6), KeySpan(0, 5), KeySpan(3, 8)])
@pytest.mark.parametrize("spans", BATCHES.values(), ids=BATCHES)
def test_slots_below_first_are_hidden(spans: list[tuple[int, int]], span: KeySpan, share: float) -> None:
    q, batch = make_batch(spans, (6, 2), 8, torch.float32)
    batch, sinks = hide(batch, share), torch.linspace(-2, 2, 6)
    expected = paged_attention_reference(q, 1, batch, span, sinks)
    torch.testing.assert_close(paged_attention(q, 1, batch, span, sinks=sinks), expected, rtol=1e-5, atol=1e-6)
    if span == FULL:
        expected = paged_attention_reference(q, 1, shifted(batch), span, sinks)
        torch.testing.assert_close(paged_attention(q, 1, batch, span, sinks=sinks), expected, rtol=1e-5, atol=1e-6)


def test_first_of_0_changes_nothing() -> None:
    q, batch = make_batch(BATCHES["decodes and chunks"], (4, 2), 8, torch.bfloat16)
    assert torch.equal(paged_attention(q, 1, hide(batch, 0)), paged_attention(q, 1, batch))


def test_rows_below_first_are_refused() -> None:
    _, batch = make_batch([(1, 9), (4, 12)], (4, 2), 8, torch.float32)
    replace(batch, first=[8, 8])
    for first in ([9, 8], [8, 9]):
        with pytest.raises(AssertionError):
            replace(batch, first=first)


def test_grouped_attention_is_the_reference_in_bf16() -> None:
    q, batch = make_batch(BATCHES["decodes and chunks"], (4, 2), 16, torch.bfloat16)
    torch.testing.assert_close(
        paged_attention(q, 1, batch), paged_attention_reference(q, 1, batch), rtol=2e-2, atol=2e-2
    )


def test_small_groups_and_pieces_of_chunks_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = [(1, 30), (1, 29), (1, 28), (1, 3), (40, 44)]
    q, batch = make_batch(spans, (4, 2), 8, torch.float32)
    expected = paged_attention(q, 0, batch)
    monkeypatch.setattr("weft_kernels.paged_attention.batch.GROUP_BYTES", 2 * 30 * 2 * 8 * 4)
    monkeypatch.setattr("weft_kernels.paged_attention.batch.MASK_ITEMS", 1)
    _, cut = make_batch(spans, (4, 2), 8, torch.float32)
    assert [group.num_seqs for group in batch.groups_within(FULL, 2, 8)] == [3, 1, 1]
    assert [group.num_seqs for group in cut.groups_within(FULL, 2, 8)] == [2, 1, 1, 1, 1, 1]
    torch.testing.assert_close(paged_attention(q, 0, cut), expected, rtol=1e-5, atol=1e-6)


def test_blocks_of_others_are_never_read() -> None:
    q, batch = make_batch([(1, 22), (1, 5), (3, 7)], (4, 2), 8, torch.float32)
    expected = paged_attention(q, 0, batch)
    others = sorted(set(range(NUM_BLOCKS)) - {block for table in batch.block_tables for block in table})
    batch.pool.memory[others] = float("nan")
    assert torch.equal(paged_attention(q, 0, batch), expected)
    longer = [[*table, *others[:5]] for table in batch.block_tables]  # reserved, not written yet
    ahead = PagedBatch(batch.pool, batch.num_heads, batch.query_starts, batch.context_lens, longer)
    assert torch.equal(paged_attention(q, 0, ahead), expected)
