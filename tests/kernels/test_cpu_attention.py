"""Rows attended in place, in C++, give what the reference defines, and read nothing but what they see."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.test_paged_attention import BATCHES, NUM_BLOCKS, NUM_LAYERS, hide, make_batch, shifted
from weft_kernels.latent_attention import latent_attention, latent_attention_reference
from weft_kernels.layer_cache import uniform_pool
from weft_kernels.paged_attention import FULL, KeySpan, PagedBatch, paged_attention, paged_attention_reference
from weft_kernels.paged_attention.cpu import make_cpu_batch

SPANS = [FULL, KeySpan(1), KeySpan(6), KeySpan(0, 5), KeySpan(3, 8)]
SHAPES = [((4, 4), 16), ((6, 2), 64), ((7, 1), 80), ((8, 2), 128), ((5, 1), 32), ((6, 2), 10), ((40, 1), 24)]
MIXED = [(1, 17), (3, 9), (1, 3), (8, 30), (20, 21), (1, 5), (9, 9)]

pytestmark = pytest.mark.usefixtures("isa")


@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize(("heads", "dim"), SHAPES)
def test_rows_in_place_are_the_reference(heads: tuple[int, int], dim: int, span: KeySpan) -> None:
    for spans in (*BATCHES.values(), MIXED):
        q, batch = make_batch(spans, heads, dim, torch.float32)
        for layer in range(NUM_LAYERS):
            expected = paged_attention_reference(q, layer, batch, span)
            torch.testing.assert_close(paged_attention(q, layer, batch, span), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("span", [FULL, KeySpan(50), KeySpan(0, 96), KeySpan(90, 128)])
def test_long_contexts_are_weighed_in_several_turns(span: KeySpan, dtype: torch.dtype) -> None:
    """Chunks of blocks that no turn's keys end with; scores grow on the way, so that earlier sums have to shrink."""
    generator = torch.Generator().manual_seed(4)
    pool = torch.randn(20, 2, NUM_LAYERS, 2, 12, 32, generator=generator)
    pool[:, :, :, 0] *= torch.linspace(0.1, 3, 20)[:, None, None, None, None]
    q = torch.randn(40, 8, 32, generator=generator).to(dtype)
    batch = PagedBatch(uniform_pool(pool.to(dtype)), 8, [0, 33, 40], [230, 71], [range(20), [7, 3, 0, 12, 11, 2]])
    # Where products are of bfloat16 throughout, so are the weights: each is off by 2^-9 at most, of values up to 4.
    rtol, atol = (1e-5, 3e-6) if dtype == torch.float32 else (2**-7, 4e-3)
    for layer in range(NUM_LAYERS):
        expected = paged_attention_reference(q, layer, batch, span)
        torch.testing.assert_close(paged_attention(q, layer, batch, span), expected, rtol=rtol, atol=atol)


def test_bfloat16_is_rounded_once_at_the_end() -> None:
    q, batch = make_batch(MIXED[:4], (4, 2), 64, torch.bfloat16)
    expected = paged_attention_reference(q, 1, batch, FULL)
    torch.testing.assert_close(paged_attention(q, 1, batch), expected, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("span", [FULL, KeySpan(6), KeySpan(0, 5)])
@pytest.mark.parametrize(("heads", "dim"), [((6, 2), 64), ((6, 2), 10), ((8, 1), 24), ((4, 2), 7), ((8, 2), 80)])
def test_chunks_of_bfloat16_of_any_size_are_the_reference(heads: tuple[int, int], dim: int, span: KeySpan) -> None:
    for spans in (MIXED, [(37, 61), (64, 64)]):
        q, batch = make_batch(spans, heads, dim, torch.bfloat16)
        expected = paged_attention_reference(q, 1, batch, span)
        torch.testing.assert_close(paged_attention(q, 1, batch, span), expected, rtol=2**-7, atol=4e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latent_vectors_are_key_and_value_at_once(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    pool = torch.randn(NUM_BLOCKS, 1, NUM_LAYERS, 1, 4, 96, generator=generator).to(dtype)
    rtol, atol = (1e-5, 3e-6) if dtype == torch.float32 else (2**-7, 4e-3)
    for heads in (6, 40):
        batch = PagedBatch(uniform_pool(pool), heads, [0, 1, 10], [13, 14], [[7, 3, 9, 20], [5, 2, 11, 12]])
        q = torch.randn(10, heads, 96, generator=generator).to(dtype)
        expected = latent_attention_reference(q, 1, batch, 80, 0.2)
        torch.testing.assert_close(latent_attention(q, 1, batch, 80, 0.2), expected, rtol=rtol, atol=atol)


def test_sequences_with_queries_enough_to_fill_vectors_are_chunks() -> None:
    _, batch = make_batch(MIXED, (4, 2), 16, torch.float32)
    rows = make_cpu_batch(batch, FULL, 2, 16)
    assert [(each.first_row, each.num_rows, each.context) for each in rows.chunks] == [
        (5, 8, 30),
        (13, 20, 21),
        (34, 9, 9),
    ]
    assert rows.spans[:, 0].tolist() == [0, 1, 2, 3, 4, 33]
    assert not len(make_cpu_batch(batch, FULL, 2, 0).spans)


@pytest.mark.parametrize("first", [None, (10, 1, 4, 7)])
@pytest.mark.parametrize("span", SPANS)
def test_nothing_but_the_keys_seen_is_read(span: KeySpan, first: tuple[int, ...] | None) -> None:
    counts = (1, 1, 3, 19)
    q, batch = make_batch([(1, 22), (1, 5), (3, 7), (19, 30)], (4, 2), 16, torch.float32)
    batch = replace(batch, first=first)
    expected = paged_attention(q, 0, batch, span)
    seen = torch.zeros(NUM_BLOCKS, batch.pool.block_tokens, dtype=torch.bool)
    for index, (table, length) in enumerate(zip(batch.block_tables, batch.context_lens, strict=True)):
        lowest = max(span.first_visible(length - counts[index]), batch.first_at(index))
        for at in range(lowest, length):
            seen[table[at // 4], at % 4] = True
    batch.pool.memory.permute(0, 4, 1, 2, 3, 5)[~seen] = float("nan")
    assert torch.equal(paged_attention(q, 0, batch, span), expected)


@pytest.mark.parametrize("share", [0.6, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("span", [FULL, KeySpan(3, 8)])
@pytest.mark.parametrize(("heads", "dim"), [SHAPES[1], ((6, 2), 10), ((40, 1), 24)])
def test_rows_see_no_slots_below_first(
    heads: tuple[int, int], dim: int, span: KeySpan, dtype: torch.dtype, share: float
) -> None:
    sinks = torch.linspace(-2, 2, heads[0])
    rtol, atol = (1e-5, 2e-6) if dtype == torch.float32 else (2**-7, 4e-3)
    for spans in (MIXED, [(37, 97), (64, 64), (20, 140)]):
        q, batch = make_batch(spans, heads, dim, dtype, num_blocks=120)
        batch = hide(batch, share)
        found = paged_attention(q, 1, batch, span, sinks=sinks)
        expected = paged_attention_reference(q, 1, batch, span, sinks)
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
        if span == FULL:
            alike = paged_attention_reference(q, 1, shifted(batch), span, sinks)
            torch.testing.assert_close(found, alike, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_blocks_give_the_bits_of_a_shorter_table(dtype: torch.dtype) -> None:
    q, batch = make_batch(MIXED, (4, 2), 64, dtype)
    found = paged_attention(q, 1, replace(batch, first=[16, 4, 0, 20, 0, 4, 0]))
    lens = [1, 5, 3, 10, 21, 1, 9]
    tables = [table[-(-length // 4) * -1 :] for table, length in zip(batch.block_tables, lens, strict=True)]
    shorter = PagedBatch(batch.pool, 4, batch.query_starts, lens, tables)
    assert torch.equal(found, paged_attention(q, 1, shorter))


def test_latent_rows_see_no_vectors_below_first() -> None:
    generator = torch.Generator().manual_seed(5)
    pool = torch.randn(NUM_BLOCKS, 1, NUM_LAYERS, 1, 4, 96, generator=generator)
    for heads in (6, 40):
        tables = [[7, 3, 9, 20], [5, 2, 11, 12]]
        batch = PagedBatch(uniform_pool(pool), heads, [0, 1, 10], [13, 14], tables, first=[6, 5])
        q = torch.randn(10, heads, 96, generator=generator)
        expected = latent_attention_reference(q, 1, batch, 80, 0.2)
        torch.testing.assert_close(latent_attention(q, 1, batch, 80, 0.2), expected, rtol=1e-5, atol=3e-6)


def test_a_row_comes_out_the_same_alone_and_among_others() -> None:
    q, batch = make_batch([(1, 30), (1, 12), (1, 29)], (4, 2), 64, torch.float32)
    alone = PagedBatch(batch.pool, 4, [0, 1], [12], [batch.block_tables[1]])
    assert torch.equal(paged_attention(q[1:2].contiguous(), 1, alone), paged_attention(q, 1, batch)[1:2])


@pytest.mark.parametrize("share", [0.0, 0.8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize(("heads", "dim"), [*SHAPES[:5], ((8, 1), 64), ((40, 1), 32), ((8, 2), 10)])
def test_decoding_rows_equal_rows_alone(
    heads: tuple[int, int], dim: int, span: KeySpan, dtype: torch.dtype, share: float
) -> None:
    spans = [(3, 9), (16, 30), (1, 5), (20, 21), (9, 24)]
    q, batch = make_batch(spans, heads, dim, dtype)
    batch = replace(hide(batch, share), decodes=[True, True, True, False, True])
    sinks = torch.linspace(-2, 2, heads[0])
    found = paged_attention(q, 1, batch, span, sinks=sinks)
    for index, (count, context) in enumerate(spans):
        for row in range(count) if batch.decodes[index] else ():
            table, at = [batch.block_tables[index]], batch.query_starts[index] + row
            lens, first = [context - count + 1 + row], [batch.first_at(index)]
            alone = PagedBatch(batch.pool, heads[0], [0, 1], lens, table, first=first)
            expected = paged_attention(q[at : at + 1].contiguous(), 1, alone, span, sinks=sinks)
            assert torch.equal(found[at : at + 1], expected)


@pytest.mark.parametrize("first", [(0, 0, 0), (1, 40, 39), (9, 13, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("span", [FULL, KeySpan(1021), KeySpan(0, 1030)])
@pytest.mark.parametrize(("heads", "block_tokens"), [((16, 4), 16), ((4, 4), 5), ((7, 1), 32), ((16, 2), 7)])
def test_grouped_rows_equal_rows_alone(
    heads: tuple[int, int], block_tokens: int, span: KeySpan, dtype: torch.dtype, first: tuple[int, ...]
) -> None:
    """Sixteen rows of which some see more than one piece of 1,024 keys, next to a short sequence and one row."""
    generator = torch.Generator().manual_seed(6)
    spans, num_heads = [(16, 1033), (9, 50), (1, 40)], heads[0]
    tables = [list(range(first, first + 220)) for first in (0, 220, 440)]
    pool = uniform_pool(torch.randn(660, heads[1], 1, 2, block_tokens, 32, generator=generator).to(dtype))
    q, sinks = torch.randn(26, num_heads, 32, generator=generator).to(dtype), torch.linspace(-2, 2, num_heads)
    batch = PagedBatch(pool, num_heads, [0, 16, 25, 26], [context for _, context in spans], tables, [True] * 3, first)
    found, at = paged_attention(q, 0, batch, span, sinks=sinks), 0
    for table, (count, context), bound in zip(tables, spans, first, strict=True):
        for row in range(count):
            alone = PagedBatch(pool, num_heads, [0, 1], [context - count + 1 + row], [table], first=[bound])
            expected = paged_attention(q[at : at + 1].contiguous(), 0, alone, span, sinks=sinks)
            assert torch.equal(found[at : at + 1], expected)
            at += 1


@pytest.mark.parametrize("first", [0, 7])
def test_a_prompt_comes_out_the_same_whole_and_in_chunks(first: int) -> None:
    q, batch = make_batch([(90, 97)], (4, 2), 64, torch.float32)
    whole = paged_attention(q, 1, replace(batch, first=[first]))
    for start, end in ((0, 16), (16, 41), (41, 90)):
        part = PagedBatch(batch.pool, 4, [0, end - start], [7 + end], batch.block_tables, first=[first])
        assert torch.equal(paged_attention(q[start:end].contiguous(), 1, part), whole[start:end])


def test_scores_far_apart_and_long_contexts_stay_exact() -> None:
    generator = torch.Generator().manual_seed(1)
    pool = torch.randn(200, 1, 1, 2, 16, 64, generator=generator)
    batch = PagedBatch(uniform_pool(pool), 4, [0, 1], [3001], [torch.randperm(200, generator=generator).tolist()])
    q = torch.randn(1, 4, 64, generator=generator)
    for factor in (0.0, 1.0, 40.0, 1e4):
        expected = paged_attention_reference(q * factor, 0, batch, FULL)
        torch.testing.assert_close(
            paged_attention(q * factor, 0, batch), expected, rtol=1e-4, atol=2e-6 * max(1, factor)
        )


@pytest.mark.parametrize("span", [FULL, KeySpan(1500), KeySpan(0, 1300)])
@pytest.mark.parametrize(("heads", "dim"), [((4, 4), 16), ((6, 2), 64), ((5, 1), 32)])
def test_long_contexts_are_cut_without_a_trace(heads: tuple[int, int], dim: int, span: KeySpan) -> None:
    """Rows that end just before, at and after a cut, two new ones of a sequence, and a short one between long ones."""
    generator = torch.Generator().manual_seed(2)
    pool = torch.full((600, heads[1], 2, 2, 16, dim), float("nan"))
    shuffled = torch.randperm(600, generator=generator).tolist()
    lengths = [1023, 1024, 30, 1025, 2600, 2049]
    tables = [[shuffled.pop() for _ in range(-(-length // 16))] for length in lengths]
    for table, length in zip(tables, lengths, strict=True):
        for index, block in enumerate(table):
            seen = pool[block, :, :, :, : length - index * 16]
            seen.copy_(torch.randn(seen.shape, generator=generator))
    batch = PagedBatch(uniform_pool(pool), heads[0], [0, 1, 2, 3, 4, 6, 7], lengths, tables)
    q = torch.randn(7, heads[0], dim, generator=generator)
    out = paged_attention(q, 1, batch, span)
    torch.testing.assert_close(out, paged_attention_reference(q, 1, batch, span), rtol=1e-4, atol=2e-6)
    alone = PagedBatch(uniform_pool(pool), heads[0], [0, 2], [2600], [tables[4]])
    assert torch.equal(paged_attention(q[4:6].contiguous(), 1, alone, span), out[4:6])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("span", [FULL, KeySpan(6)])
@pytest.mark.parametrize(("heads", "dim"), SHAPES)
def test_sinks_join_the_denominator(heads: tuple[int, int], dim: int, span: KeySpan, dtype: torch.dtype) -> None:
    sinks = torch.linspace(-3, 6, heads[0])
    for spans in (MIXED, [(64, 64)], [(1, 30)]):
        q, batch = make_batch(spans, heads, dim, dtype)
        expected = paged_attention_reference(q, 1, batch, span, sinks)
        rtol, atol = (1e-5, 2e-6) if dtype == torch.float32 else (2**-7, 4e-3)
        found = paged_attention(q, 1, batch, span, sinks=sinks)
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
        assert not torch.allclose(found, paged_attention(q, 1, batch, span), atol=1e-2)


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 1)])
def test_sinks_count_once_in_contexts_that_are_cut(heads: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(2)
    pool = torch.randn(400, heads[1], 1, 2, 16, 32, generator=generator)
    batch = PagedBatch(uniform_pool(pool), heads[0], [0, 1, 2], [2600, 3000], [range(163), range(170, 360)])
    q, sinks = torch.randn(2, heads[0], 32, generator=generator), torch.linspace(4, 11, heads[0])
    expected = paged_attention_reference(q, 0, batch, FULL, sinks)
    torch.testing.assert_close(paged_attention(q, 0, batch, sinks=sinks), expected, rtol=1e-4, atol=2e-6)


def test_sinks_far_from_the_scores_stay_exact() -> None:
    q, batch = make_batch([(1, 20), (60, 130)], (4, 2), 64, torch.float32)
    sinks = torch.tensor([-1e4, 90.0, 1e4, -90.0])
    for factor in (0.0, 1.0, 1e4):
        expected = paged_attention_reference(q * factor, 0, batch, FULL, sinks)
        found = paged_attention(q * factor, 0, batch, sinks=sinks)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-6 * max(1, factor))


def test_chunks_of_scores_far_apart_stay_exact() -> None:
    q, batch = make_batch([(60, 130)], (4, 2), 64, torch.float32)
    for factor in (0.0, 1.0, 40.0, 1e4):
        expected = paged_attention_reference(q * factor, 0, batch, FULL)
        torch.testing.assert_close(
            paged_attention(q * factor, 0, batch), expected, rtol=1e-4, atol=2e-6 * max(1, factor)
        )


def test_the_number_of_threads_changes_nothing() -> None:
    q, batch = make_batch([(1, 30), (1, 29), (8, 28), (60, 60)], (8, 4), 128, torch.float32)
    long_pool = torch.randn(300, 1, 1, 2, 16, 64, generator=torch.Generator().manual_seed(4))
    long_batch = PagedBatch(uniform_pool(long_pool), 4, [0, 1], [4500], [range(300)])
    long_q = torch.randn(1, 4, 64, generator=torch.Generator().manual_seed(5))
    before = torch.get_num_threads()
    try:
        outs, long_outs = [], []
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            outs.append(paged_attention(q, 1, batch))
            long_outs.append(paged_attention(long_q, 0, long_batch))
        assert torch.equal(*outs)
        assert torch.equal(*long_outs)
    finally:
        torch.set_num_threads(before)
