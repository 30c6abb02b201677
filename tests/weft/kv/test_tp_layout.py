"""Every pair of degrees: what a rank pulls is exactly its own share of the block, whoever sends it."""

from __future__ import annotations

from collections import Counter

import pytest

from weft.kv.tp_layout import HeadRange, RankCopy, head_range, rank_copies

DEGREES = (1, 2, 4, 8, 16)


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
