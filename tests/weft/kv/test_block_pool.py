"""The pool's books: whatever is done in whatever order, no block is lost, shared by mistake or reused too early."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from weft.kv.block_pool import BlockPool, PoolCounts, PoolExhausted

NUM_BLOCKS = 7
KEYS = [bytes([i]) for i in range(5)]


def test_a_released_private_block_is_free_and_a_published_one_is_cached() -> None:
    pool = BlockPool(4)
    private, shared = pool.reserve(2)
    assert pool.publish(shared, b"k")
    pool.release([private, shared])
    assert pool.counts() == PoolCounts(free=3, active=0, cached=1, quarantined=0)
    assert pool.match([b"k"]) == [shared]
    assert pool.counts() == PoolCounts(free=3, active=1, cached=0, quarantined=0)


def test_a_match_ends_at_the_first_unknown_key() -> None:
    pool = BlockPool(4)
    first, third = pool.reserve(2)
    pool.publish(first, b"1")
    pool.publish(third, b"3")
    assert pool.match([b"1", b"2", b"3"]) == [first]


def test_of_two_blocks_with_one_key_the_first_stays_findable() -> None:
    pool = BlockPool(4)
    first, second = pool.reserve(2)
    assert pool.publish(first, b"k")
    assert not pool.publish(second, b"k")
    pool.release([first, second])
    assert pool.match([b"k"]) == [first]
    assert pool.counts() == PoolCounts(free=3, active=1, cached=0, quarantined=0)


def test_the_end_of_the_least_recently_used_prefix_is_evicted_first() -> None:
    pool = BlockPool(4)
    old, new = pool.reserve(2), pool.reserve(2)
    for block, key in zip(old + new, [b"old0", b"old1", b"new0", b"new1"], strict=True):
        pool.publish(block, key)
    pool.release(old)
    pool.release(new)
    assert pool.reserve(1) == [old[1]]
    assert pool.match([b"old0"]) == [old[0]]
    assert pool.reserve(1) == [new[1]]


def test_reserving_too_much_takes_nothing() -> None:
    pool = BlockPool(3)
    held = pool.reserve(1)
    pool.publish(held[0], b"k")
    pool.release(held)
    with pytest.raises(PoolExhausted, match="4 blocks wanted, 3 available"):
        pool.reserve(4)
    assert pool.counts() == PoolCounts(free=2, active=0, cached=1, quarantined=0)


def test_a_quarantined_block_comes_back_by_word_alone() -> None:
    pool = BlockPool(3)
    first, second = pool.reserve(2)
    pool.quarantine([first, second])
    assert pool.reserve(1) == [2]
    assert pool.num_available == 0
    pool.unquarantine([first])
    pool.unquarantine([first, second, 2])  # only the second is in quarantine still
    assert pool.counts() == PoolCounts(free=2, active=1, cached=0, quarantined=0)


@pytest.mark.parametrize("misuse", ["publish twice", "quarantine a shared block", "publish a free block"])
def test_a_bug_in_the_caller_is_an_assertion(misuse: str) -> None:
    pool = BlockPool(2)
    block = pool.reserve(1)[0]
    pool.publish(block, b"k")
    actions: dict[str, Callable[[], object]] = {
        "publish twice": lambda: pool.publish(block, b"other"),
        "quarantine a shared block": lambda: pool.quarantine([block]),
        "publish a free block": lambda: pool.publish(1, b"other"),
    }
    with pytest.raises(AssertionError):
        actions[misuse]()


class PoolMachine(RuleBasedStateMachine):
    """Holders with one reference each stand for sequences and pins; the model is what each of them was promised."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.refs: dict[int, int] = {}
        self.key_of: dict[int, bytes] = {}  # of held and cached blocks
        self.suspect: set[int] = set()
        self.heard: set[bytes] = set()  # what somebody knows who only hears of changes

    def drop(self, block: int) -> None:
        self.refs[block] -= 1
        if not self.refs[block]:
            del self.refs[block]

    @rule(target=held, count=st.integers(0, NUM_BLOCKS + 1))
    def reserve(self, count: int) -> object:
        num_untouchable = len(self.refs) + len(self.suspect)
        if count > NUM_BLOCKS - num_untouchable:
            with pytest.raises(PoolExhausted):
                self.pool.reserve(count)
            return multiple()
        blocks = self.pool.reserve(count)
        assert len(set(blocks)) == count
        for block in blocks:
            assert block not in self.refs
            assert block not in self.suspect
            self.key_of.pop(block, None)
            self.refs[block] = 1
        return multiple(*blocks)

    @rule(target=held, keys=st.lists(st.sampled_from(KEYS), unique=True))
    def match(self, keys: list[bytes]) -> object:
        blocks = self.pool.match(keys)
        for block, key in zip(blocks, keys, strict=False):
            assert self.key_of[block] == key
            self.refs[block] = self.refs.get(block, 0) + 1
        return multiple(*blocks)

    @rule(target=held, block=consumes(held), key=st.sampled_from(KEYS))
    def publish(self, block: int, key: bytes) -> int:
        if block not in self.key_of:
            is_first = key not in self.key_of.values()
            assert self.pool.publish(block, key) is is_first
            if is_first:
                self.key_of[block] = key
        return block

    @rule(block=consumes(held))
    def release(self, block: int) -> None:
        self.pool.release([block])
        self.drop(block)

    @rule(one=consumes(held), other=consumes(held))
    def foretell_and_release(self, one: int, other: int) -> None:
        before, freed = self.pool.num_available, self.pool.num_freeable([one, other])
        self.pool.release([one, other])
        self.drop(one)
        self.drop(other)
        assert self.pool.num_available == before + freed

    @rule()
    def hear(self) -> None:
        for key, is_findable in self.pool.take_changes().items():
            (self.heard.add if is_findable else self.heard.discard)(key)
        assert self.heard == set(self.key_of.values())
        assert self.pool.take_changes() == {}

    @rule(block=consumes(held))
    def quarantine(self, block: int) -> None:
        if self.refs[block] > 1 or block in self.key_of:
            self.release(block)
            return
        self.pool.quarantine([block])
        self.drop(block)
        self.suspect.add(block)

    @precondition(lambda self: self.suspect)
    @rule(data=st.data())
    def unquarantine(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.suspect)))
        self.pool.unquarantine([block])
        self.suspect.remove(block)

    @invariant()
    def every_block_is_in_one_state(self) -> None:
        counts = self.pool.counts()
        assert counts.free + counts.active + counts.cached + counts.quarantined == NUM_BLOCKS
        assert counts.active == len(self.refs)
        assert counts.quarantined == len(self.suspect)
        assert counts.cached == len(self.key_of.keys() - self.refs.keys())
        assert self.pool.num_available == counts.free + counts.cached
        assert {key for key in KEYS if self.pool.is_known(key)} == set(self.key_of.values())


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase
