"""Paging of layer groups, checked position by position, and copies between tensor-parallel ranks."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.kv.block_pool import page_key
from weft.kv.layer_groups import (
    AttentionSpan,
    HeadRange,
    PageRange,
    PagingPolicy,
    RankCopy,
    head_range,
    rank_copies,
)

REACHES = (
    st.just(AttentionSpan())
    | st.builds(AttentionSpan, window=st.integers(1, 40))
    | st.builds(AttentionSpan, chunk=st.integers(1, 40))
)
PAGINGS = st.builds(
    PagingPolicy,
    spans=st.lists(REACHES, min_size=1, max_size=3).map(tuple),
    block_tokens=st.integers(1, 16),
    chunk_tokens=st.integers(1, 20),
)
DEGREES = (1, 2, 4, 8, 16)


def sees(reach: AttentionSpan, position: int, other: int) -> bool:
    """Apply the definition of a span."""
    in_window = not reach.window or other > position - reach.window
    in_chunk = not reach.chunk or other // reach.chunk == position // reach.chunk
    return other <= position and in_window and in_chunk


@given(REACHES, st.integers(0, 200))
def test_the_first_token_needed_is_the_first_that_this_token_or_any_behind_it_sees(
    reach: AttentionSpan, position: int
) -> None:
    first = reach.first(position)
    assert sees(reach, position, first)
    later = range(position, position + 100)
    assert not any(sees(reach, each, other) for each in later for other in range(max(0, first - 60), first))


@given(PAGINGS, st.data())
def test_the_longest_hit_is_the_longest_prefix_whose_next_token_has_all_that_it_sees(
    paging: PagingPolicy, data: st.DataObject
) -> None:
    keys = [bytes([number]) for number in range(data.draw(st.integers(0, 12)))]
    pages = [page_key(key, group) for key in keys for group in range(len(paging.spans))]
    known = set(pages) - set(data.draw(st.lists(st.sampled_from(pages), max_size=6)) if pages else ())
    size = paging.block_tokens

    def is_good(num_blocks: int) -> bool:
        return all(
            page_key(keys[other // size], group) in known
            for group, reach in enumerate(paging.spans)
            for other in range(num_blocks * size)
            # the next token, or one behind it that is computed from it on
            if sees(reach, num_blocks * size, other)
        )

    assert paging.longest_prefix_hit(keys, known.__contains__) == max(n for n in range(len(keys) + 1) if is_good(n))


@given(PAGINGS, st.integers(0, 10), st.integers(1, 200), st.data())
def test_pages_had_before_a_prompt_is_filled_are_enough_wherever_they_come_to_lie(
    paging: PagingPolicy, num_hit: int, num_tokens: int, data: st.DataObject
) -> None:
    size, total = paging.block_tokens, paging.num_blocks(num_tokens)
    num_hit = min(num_hit, (num_tokens - 1) // size)
    num_ready = data.draw(st.integers(num_hit * size, num_tokens))
    for group, reach in enumerate(paging.spans):
        first = paging.first(group, num_hit * size)
        num_pages = num_hit - first + paging.num_new_pages(group, num_hit, total)
        run = PageRange(first, tuple(range(100, 100 + num_pages)))
        sight, lent = (
            paging.retention_point(num_ready, num_tokens),
            paging.needed_blocks(group, num_hit, num_ready, num_tokens),
        )
        placed = paging.remap(group, run, num_hit, sight)
        assert [placed.page(at) for at in lent] == [*placed.within(lent.start, lent.stop).blocks]
        for other in range(num_ready):
            # by what goes on from there, or by who asks for the same prompt once more
            if sees(reach, num_ready, other) or (other < sight and sees(reach, sight, other)):
                page = placed.page(other // size)
                assert page is not None
                # found pages stay where they are, and nothing comes to lie in them
                assert (page < 100 + num_hit - first) == (other // size < num_hit)
                assert other // size < num_hit or other // size in lent
        # and the next step can be taken
        assert placed.end >= min(total, paging.num_blocks(num_ready + paging.chunk_tokens))


@given(PAGINGS, st.integers(0, 300))
def test_leaving_out_blocks_before_a_run_changes_nothing_that_is_seen(paging: PagingPolicy, position: int) -> None:
    for group, reach in enumerate(paging.spans):
        left_out = paging.skipped_blocks(group, paging.first(group, position)) * paging.block_tokens
        for later in range(position, position + 2 * paging.chunk_tokens):
            assert reach.first(later) - left_out == reach.first(later - left_out)


@given(PAGINGS, st.integers(1, 150), st.integers(1, 20))
def test_pages_while_generating_are_never_more_than_counted(
    paging: PagingPolicy, num_prompt: int, num_new: int
) -> None:
    for num_tokens in range(num_prompt, num_prompt + num_new):
        held = sum(
            paging.num_blocks(num_tokens + 1) - paging.first(group, num_tokens) for group in range(len(paging.spans))
        )
        assert held <= paging.num_pages(num_tokens + 1) <= paging.max_pages(num_tokens + 1)


@pytest.mark.parametrize("num_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("lender_degree", DEGREES)
@pytest.mark.parametrize("degree", DEGREES)
@pytest.mark.parametrize("head_bytes", [1, 6])
def test_a_rank_gets_its_share_and_nothing_else(
    num_heads: int, lender_degree: int, degree: int, head_bytes: int
) -> None:
    block = bytes(range(num_heads * head_bytes))

    def part(all_ranks: int, rank: int) -> bytes:
        heads = head_range(num_heads, all_ranks, rank)
        return block[heads.first * head_bytes : heads.end * head_bytes]

    for rank in range(degree):
        own = bytearray(b"\xff" * len(part(degree, rank)))
        written = 0
        for move in rank_copies(num_heads, head_bytes, lender_degree, degree, rank):
            sent = part(lender_degree, move.source_rank)[move.source_offset : move.source_offset + move.size_bytes]
            assert len(sent) == move.size_bytes
            own[move.offset : move.offset + move.size_bytes] = sent
            written += move.size_bytes
        assert bytes(own) == part(degree, rank)
        assert written == len(own)


def test_equal_degrees_are_one_run_from_the_same_rank() -> None:
    assert rank_copies(8, 100, 4, 4, 3) == (RankCopy(3, 0, 0, 200),)


def test_one_lender_feeds_many_and_many_feed_one() -> None:
    assert rank_copies(8, 100, 1, 4, 2) == (RankCopy(0, 400, 0, 200),)
    assert rank_copies(8, 100, 4, 1, 0) == tuple(RankCopy(rank, 0, 200 * rank, 200) for rank in range(4))


def test_copies_of_a_head_share_the_work() -> None:
    # one latent head on eight ranks: each of the eight borrowers reads from another lender
    lenders = Counter(rank_copies(1, 576, 8, 8, rank)[0].source_rank for rank in range(8))
    assert lenders == Counter(range(8))


def test_neighbours_hold_the_same_head_when_there_are_more_ranks_than_heads() -> None:
    assert [head_range(2, 4, rank) for rank in range(4)] == [
        HeadRange(0, 1),
        HeadRange(0, 1),
        HeadRange(1, 1),
        HeadRange(1, 1),
    ]


@pytest.mark.parametrize(("num_heads", "degree", "rank"), [(8, 3, 0), (3, 8, 0), (8, 4, 4), (8, 4, -1)])
def test_what_does_not_divide_is_refused(num_heads: int, degree: int, rank: int) -> None:
    with pytest.raises(ValueError, match="rank"):
        head_range(num_heads, degree, rank)
