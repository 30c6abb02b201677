"""Several blocks under one key, and keys of pages."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.kv.block_pool import KEY_BYTES, BlockPool, PageVariant, PoolCounts, PoolExhausted, page_key

BASES = [bytes([index]) * KEY_BYTES for index in range(6)]
NUM_BLOCKS, NUM_OPERATIONS = 24, 100_000


def state_key(base: bytes) -> bytes:
    return page_key(base, 1, PageVariant.STATE)


@given(st.integers(0, 9), st.sampled_from(PageVariant), st.integers(0, 9))
def test_page_keys_differ_by_each_part(group: int, variant: PageVariant, part: int) -> None:
    key = page_key(BASES[0], group, variant, part)
    assert key == BASES[0] + (bytes([group, 0, variant, part, 0]) if group or variant or part else b"")


def test_a_compound_entry_is_matched_and_evicted_as_a_whole() -> None:
    pool = BlockPool(4)
    held = tuple(pool.reserve(3))
    assert pool.publish(held, b"k")
    pool.release(held)
    assert pool.counts() == PoolCounts(free=1, active=0, cached=3, quarantined=0)
    assert pool.match([b"k"]) == list(held)
    with pytest.raises(PoolExhausted):
        pool.reserve(2)
    pool.release(held)
    pool.reserve(2)
    assert pool.counts() == PoolCounts(free=2, active=2, cached=0, quarantined=0)
    assert pool.take_changes() == {b"k": False}


def test_blocks_with_unlike_holders_have_no_common_key() -> None:
    pool = BlockPool(2)
    first, second = pool.reserve(2)
    pool.publish(first, b"k")
    pool.match([b"k"])
    pool.release([first])
    with pytest.raises(AssertionError):
        pool.publish((first, second), b"other")


@pytest.mark.parametrize("is_held", [False, True])
def test_a_state_leaves_with_the_block_that_it_follows(is_held: bool) -> None:
    pool = BlockPool(4)
    (base,), state = pool.reserve(1), tuple(pool.reserve(2))
    pool.publish(base, BASES[0])
    pool.publish(state, state_key(BASES[0]))
    pool.release([base])
    if not is_held:
        pool.release(state)
    (free,) = pool.reserve(1)
    pool.reserve(1)  # evicts the block, which was released first
    assert not pool.is_known(BASES[0])
    assert not pool.is_known(state_key(BASES[0]))
    if is_held:
        pool.release(state)
    assert pool.counts() == PoolCounts(free=2, active=2, cached=0, quarantined=0)
    assert free in range(4)


def test_random_operations_leave_no_block_behind() -> None:
    """Random operations on pages and states of a few blocks; each block is always in one state."""
    dice, pool = random.Random(11), BlockPool(NUM_BLOCKS)
    held: list[tuple[int, ...]] = []
    known: set[bytes] = set()
    private: set[tuple[int, ...]] = set()
    for _ in range(NUM_OPERATIONS):
        base, action = dice.choice(BASES), dice.random()
        key = state_key(base) if dice.random() < 0.5 else base
        if action < 0.35 and held:
            released = held.pop(dice.randrange(len(held)))
            private.discard(released)
            pool.release(released)
        elif action < 0.6 and (found := pool.match([key])):
            held.append(tuple(found))
        elif action < 0.65 and held and held[-1] in private:
            private.remove(suspect := held.pop())
            pool.quarantine(suspect)
            assert pool.counts().quarantined == len(suspect)
            pool.unquarantine(suspect)
        else:
            count = 3 if len(key) > KEY_BYTES else 1
            if count > pool.num_available:
                continue
            blocks = tuple(pool.reserve(count))
            held.append(blocks)
            is_known = pool.is_known(key)
            assert pool.publish(blocks, key) is not is_known
            if is_known:
                private.add(blocks)
        for changed, is_findable in pool.take_changes().items():
            (known.add if is_findable else known.discard)(changed)
        counts = pool.counts()
        assert counts.active == len({block for blocks in held for block in blocks})
        assert counts.free + counts.active + counts.cached == NUM_BLOCKS
        assert pool.num_available == counts.free + counts.cached
    for blocks in held:
        pool.release(blocks)
    assert known == {key for base in BASES for key in (base, state_key(base)) if pool.is_known(key)}
    pool.reserve(NUM_BLOCKS)
    assert not any(pool.is_known(key) for base in BASES for key in (base, state_key(base)))
