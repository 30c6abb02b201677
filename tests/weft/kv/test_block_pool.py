"""Block keys, the pool of block numbers, and the queue of full blocks for the store."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from weft.kv.block_pool import (
    KEY_BYTES,
    BlockPool,
    FullBlock,
    OffloadQueue,
    PoolCounts,
    PoolExhausted,
    bare_key,
    block_key,
    block_keys,
    page_key,
    plain_key,
    reusable_blocks,
    root_key,
    tenant_tag,
)
from weft.request import Retention

NUM_BLOCKS = 7
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
POOL_BLOCKS = 8


KEYS = [bytes([i]) for i in range(5)]
KEY = block_key(root_key(b""), [1, 2, 3])


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
    """Each holder has one reference; the model records what it was promised."""

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


def test_keys_are_the_same_in_every_process_and_release() -> None:
    keys = block_keys([1, 2, 3, 4, 5], 2, b"tenant")
    assert [key.hex()[:16] for key in keys] == ["8048828dfbc55dab", "fce45b2f61737c25"]
    assert {len(key) for key in keys} == {KEY_BYTES}


@given(TOKENS, st.integers(1, 7), st.binary(max_size=4))
def test_there_is_one_key_for_each_full_block(tokens: list[int], block_tokens: int, salt: bytes) -> None:
    keys = block_keys(tokens, block_tokens, salt)
    assert len(keys) == len(tokens) // block_tokens
    assert len(set(keys)) == len(keys)


@given(TOKENS, TOKENS, st.integers(1, 7))
def test_two_sequences_share_the_keys_of_the_blocks_they_share(one: list[int], two: list[int], size: int) -> None:
    common = 0
    while common < min(len(one), len(two)) and one[common] == two[common]:
        common += 1
    pairs = list(zip(block_keys(one, size), block_keys(two, size), strict=False))
    assert [a == b for a, b in pairs] == [(index + 1) * size <= common for index in range(len(pairs))]


def test_another_salt_and_other_extras_give_other_keys() -> None:
    assert len({root_key(b""), root_key(b"a"), root_key(b"", b"a"), root_key(b"a", b"a"), root_key(b"aa")}) == 5
    assert set(block_keys([1] * 8, 4, b"a")).isdisjoint(block_keys([1] * 8, 4, b"b"))


def test_a_key_depends_on_its_parent() -> None:
    assert block_key(root_key(b""), [1, 2]) != block_key(root_key(b"x"), [1, 2])


def test_tenants_are_told_apart_by_tags_that_are_the_same_everywhere_and_those_who_share_have_none() -> None:
    assert tenant_tag(b"acme").hex() == "e56c042f4da1bb2d"
    assert tenant_tag(b"acme") != tenant_tag(b"other")
    assert tenant_tag(b"") == b""


@pytest.mark.parametrize(("num_tokens", "reusable"), [(1, 0), (16, 0), (17, 1), (32, 1), (33, 2)])
def test_one_token_at_least_is_left_to_compute(num_tokens: int, reusable: int) -> None:
    assert reusable_blocks(num_tokens, 16) == reusable


def seal(pool: BlockPool, offers: OffloadQueue, *names: str) -> list[str]:
    """Fill blocks of these keys in order, end their sequence, and return the offered keys."""
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
    pool = BlockPool(POOL_BLOCKS)
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
    pool = BlockPool(POOL_BLOCKS)
    offers = OffloadQueue(pool, POOL_BLOCKS)
    blocks = pool.reserve(6)
    for block, name in zip(blocks, "abcdef", strict=True):
        pool.publish(block, name.encode())
        offers.add(FullBlock(name.encode(), block))
    pool.release(blocks)
    offers.on_copied(blocks)
    pool.release(pool.reserve(4))
    assert len(pool.match([name.encode() for name in "abcdef"])) == 4


def test_who_was_evicted_while_it_waited_is_passed_over_and_comes_again_with_its_next_block() -> None:
    pool = BlockPool(POOL_BLOCKS)
    offers = OffloadQueue(pool, 1)
    assert seal(pool, offers, *"abc") == ["a"]
    # all but the pinned one are taken, and given back without a key
    taken = pool.reserve(POOL_BLOCKS - 1)
    pool.release(taken)
    assert seal(pool, offers, "x", "c") == []
    assert keys(offers.on_copied([block_of(pool, "a")])) == ["c"]
    offered = offers.on_copied([block_of(pool, "c")])
    assert [(each.block_key, each.block) for each in offered] == [(b"x", block_of(pool, "x"))]
    assert offers.on_copied([block_of(pool, "x")]) == []
    assert pool.counts().active == 0


def test_no_more_wait_than_the_pool_has_blocks() -> None:
    pool = BlockPool(POOL_BLOCKS)
    offers = OffloadQueue(pool, 1)
    (first,) = seal(pool, offers, "0")
    names = [str(number) for number in range(1, 100)]
    for name in names:
        assert seal(pool, offers, name) == []
    assert len(offers._waiting) <= POOL_BLOCKS
    heard = []
    while offered := offers.on_copied([block_of(pool, first)]):
        (first,) = keys(offered)
        heard.append(first)
    assert heard == names[-(POOL_BLOCKS - 1) :]


def test_a_block_that_is_answered_for_twice_is_given_back_once() -> None:
    pool = BlockPool(POOL_BLOCKS)
    offers = OffloadQueue(pool, 1)
    assert seal(pool, offers, *"ab") == ["a"]
    (reader,) = pool.match([b"a"])
    assert keys(offers.on_copied([reader, reader])) == ["b"]
    offers.on_copied([reader])
    assert pool.counts().active == 2
    pool.release([reader])
    assert pool.counts().active == 1


def test_where_nobody_copies_nothing_is_pinned() -> None:
    pool = BlockPool(POOL_BLOCKS)
    offers = OffloadQueue(pool, 0)
    assert seal(pool, offers, *"abc") == []
    assert offers.on_copied([0, 1]) == []
    assert pool.counts().active == 0


def test_changes_name_a_block_once_for_both_kinds_of_its_page() -> None:
    """A block without the KV of the draft layer spares a prompt as much as one with it."""
    pool = BlockPool(3)
    for page in (page_key(KEY, 1), bare_key(page_key(KEY, 1))):
        assert plain_key(page) == page_key(KEY, 1)
        pool.publish(pool.reserve(1)[0], page)
        assert pool.take_changes() == {page_key(KEY, 1): True}
    held = pool.match([page_key(KEY, 1)])
    pool.release([0, 1])  # the bare page may be evicted now, the plain one is held
    pool.reserve(2)
    assert pool.take_changes() == {page_key(KEY, 1): True}
    pool.release(held)
    pool.reserve(1)
    assert pool.take_changes() == {page_key(KEY, 1): False}
