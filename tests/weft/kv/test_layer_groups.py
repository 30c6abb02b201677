"""Pages by group: what is found, placed and lent is what tokens look at, checked position by position."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft.kv.layer_groups import AttentionSpan, PageRange, PagingPolicy, page_key

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


def sees(reach: AttentionSpan, position: int, other: int) -> bool:
    """The definition."""
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
