"""Full blocks take turns to be copied elsewhere; none is copied that is somebody else's by then."""

from __future__ import annotations

from weft.kv.block_pool import BlockPool
from weft.kv.offload_queue import FullBlock, OffloadQueue
from weft.request import Retention

NUM_BLOCKS = 8


def seal(pool: BlockPool, offers: OffloadQueue, *names: str) -> list[str]:
    """Blocks of these keys become full one after the other, and their sequence ends; who is offered meanwhile."""
    blocks = pool.reserve(len(names))
    offered = []
    for block, name in zip(blocks, names, strict=True):
        assert pool.publish(block, name.encode())
        offered += offers.add(FullBlock(name.encode(), block, b"tenant", Retention(60)))
    pool.release(blocks)
    return keys(offered)


def keys(offered: list[FullBlock]) -> list[str]:
    return [each.block_key.decode() for each in offered]


def block_of(pool: BlockPool, name: str) -> int:
    (block,) = pool.match([name.encode()])
    pool.release([block])
    return block


def test_only_so_many_are_offered_and_the_next_ones_when_these_are_answered() -> None:
    pool = BlockPool(NUM_BLOCKS)
    offers = OffloadQueue(pool, 2)
    assert seal(pool, offers, *"abcde") == ["a", "b"]
    assert pool.counts().active == 2
    assert keys(offers.on_copied([block_of(pool, "b")])) == ["c"]
    (last,) = offers.on_copied([block_of(pool, "a"), 7])
    assert last == FullBlock(b"d", block_of(pool, "d"), b"tenant", Retention(60))
    assert keys(offers.on_copied([block_of(pool, "c"), last.block])) == ["e"]
    assert offers.on_copied([block_of(pool, "e")]) == []
    assert pool.counts().active == 0


def test_of_a_prefix_that_only_its_copies_kept_the_end_goes_first() -> None:
    pool = BlockPool(NUM_BLOCKS)
    offers = OffloadQueue(pool, NUM_BLOCKS)
    blocks = pool.reserve(6)
    for block, name in zip(blocks, "abcdef", strict=True):
        pool.publish(block, name.encode())
        offers.add(FullBlock(name.encode(), block))
    pool.release(blocks)
    offers.on_copied(blocks)
    pool.release(pool.reserve(4))
    assert len(pool.match([name.encode() for name in "abcdef"])) == 4


def test_who_was_evicted_while_it_waited_is_passed_over_and_comes_again_with_its_next_block() -> None:
    pool = BlockPool(NUM_BLOCKS)
    offers = OffloadQueue(pool, 1)
    assert seal(pool, offers, *"abc") == ["a"]
    # all but the pinned one are taken, and given back without a key
    taken = pool.reserve(NUM_BLOCKS - 1)
    pool.release(taken)
    assert seal(pool, offers, "x", "c") == []
    assert keys(offers.on_copied([block_of(pool, "a")])) == ["c"]
    offered = offers.on_copied([block_of(pool, "c")])
    assert [(each.block_key, each.block) for each in offered] == [(b"x", block_of(pool, "x"))]
    assert offers.on_copied([block_of(pool, "x")]) == []
    assert pool.counts().active == 0


def test_no_more_wait_than_the_pool_has_blocks() -> None:
    pool = BlockPool(NUM_BLOCKS)
    offers = OffloadQueue(pool, 1)
    (first,) = seal(pool, offers, "0")
    names = [str(number) for number in range(1, 100)]
    for name in names:
        assert seal(pool, offers, name) == []
    assert len(offers._waiting) <= NUM_BLOCKS
    heard = []
    while offered := offers.on_copied([block_of(pool, first)]):
        (first,) = keys(offered)
        heard.append(first)
    assert heard == names[-(NUM_BLOCKS - 1) :]


def test_a_block_that_is_answered_for_twice_is_given_back_once() -> None:
    pool = BlockPool(NUM_BLOCKS)
    offers = OffloadQueue(pool, 1)
    assert seal(pool, offers, *"ab") == ["a"]
    (reader,) = pool.match([b"a"])
    assert keys(offers.on_copied([reader, reader])) == ["b"]
    offers.on_copied([reader])
    assert pool.counts().active == 2
    pool.release([reader])
    assert pool.counts().active == 1


def test_where_nobody_copies_nothing_is_pinned() -> None:
    pool = BlockPool(NUM_BLOCKS)
    offers = OffloadQueue(pool, 0)
    assert seal(pool, offers, *"abc") == []
    assert offers.on_copied([0, 1]) == []
    assert pool.counts().active == 0
