"""The index against the plainest model of itself, and its bound."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.request import Retention
from weft_services.kvstore.block_index import IndexLimits, MemoryIndex, StoredBlock

ONE, OTHER = b"1" * 16, b"2" * 16


def block(number: int, checksum: int = 0) -> StoredBlock:
    return StoredBlock(bytes([number]), checksum, 10)


def keys(*numbers: int) -> list[bytes]:
    return [bytes([number]) for number in numbers]


def find(index: MemoryIndex, fingerprint: bytes, *numbers: int) -> list[StoredBlock | None]:
    return [index.find(fingerprint, key) for key in keys(*numbers)]


def test_models_are_told_apart() -> None:
    index = MemoryIndex()
    index.add(ONE, [block(1)])
    assert (find(index, ONE, 1), find(index, OTHER, 1)) == ([block(1)], [None])


def test_the_least_recently_matched_is_forgotten_first() -> None:
    index = MemoryIndex(IndexLimits(max_blocks=3))
    index.add(ONE, [block(1), block(2), block(3)])
    find(index, ONE, 1)
    index.add(ONE, [block(4)])
    assert len(index) == 3
    assert find(index, ONE, 2) == [None]
    assert find(index, ONE, 1, 3, 4) == [block(1), block(3), block(4)]


def test_a_block_that_was_put_anew_is_not_dropped_for_the_old_one() -> None:
    index = MemoryIndex()
    old, new = block(1, checksum=7), block(1, checksum=8)
    index.add(ONE, [old])
    index.add(ONE, [new])
    index.drop(ONE, [old])
    assert find(index, ONE, 1) == [new]
    index.drop(ONE, [new])
    assert len(index) == 0


def test_bytes_that_are_known_no_more_are_told_so_that_they_go_from_the_store() -> None:
    now = 1000.0
    index = MemoryIndex(IndexLimits(ttl_seconds=60), clock=lambda: now)
    old, other = StoredBlock(b"k", 1, 10, stored_at=now), StoredBlock(b"k", 2, 10, stored_at=now)
    assert index.add(ONE, [old]) == []
    assert index.add(ONE, [old]) == [], "the same bytes under the same name"
    assert index.add(ONE, [other]) == [(ONE, old)]
    now = 1061.0
    assert index.find(ONE, b"k") is None
    assert index.sweep() == [(ONE, other)], "found too old before the sweep came by"
    assert index.sweep() == []
    index.add(ONE, [replace(old, stored_at=now)])
    now = 1122.0
    assert index.find(ONE, b"k") is None
    assert [each.checksum for _, each in index.add(ONE, [])] == [1]


@pytest.mark.parametrize(
    ("ttl_seconds", "idle_seconds", "uses", "gone_at"),
    [
        pytest.param(60, 0, [60.0], 60.5, id="the store's time"),
        pytest.param(0, 60, [50.0, 110.0, 170.0], 230.5, id="its own time, which each use begins anew"),
        pytest.param(100, 60, [50.0, 100.0], 100.5, id="uses do not extend the store's time"),
    ],
)
def test_block_expires_after_its_time(ttl_seconds: float, idle_seconds: int, uses: list[float], gone_at: float) -> None:
    now = 0.0
    index = MemoryIndex(IndexLimits(ttl_seconds=ttl_seconds), clock=lambda: now, steady=lambda: now)
    index.add(ONE, [StoredBlock(b"k", 1, 10, retention=Retention(idle_seconds)), StoredBlock(b"other", 1, 10)])
    for moment in uses:
        now = moment
        assert index.find(ONE, b"k") is not None
    now = gone_at
    assert index.find(ONE, b"k") is None
    assert (index.find(ONE, b"other") is None) == (ttl_seconds > 0)
    assert len(index) == (ttl_seconds == 0)


def test_a_clock_that_is_set_does_not_change_how_long_ago_a_use_was() -> None:
    wall, now = 1000.0, 5.0
    index = MemoryIndex(clock=lambda: wall, steady=lambda: now)
    index.add(ONE, [StoredBlock(b"k", 1, 10, stored_at=wall, retention=Retention(60))])
    for moment in (1e9, 0.0):
        wall = moment
        assert index.find(ONE, b"k") is not None
    now = 66.0
    assert index.find(ONE, b"k") is None


def owned(number: int, tenant: bytes) -> StoredBlock:
    return StoredBlock(bytes([number]), 0, 10, tenant)


def test_a_tenant_over_its_share_loses_what_it_used_least_recently_and_nobody_else_loses_anything() -> None:
    index = MemoryIndex(IndexLimits(tenant_bytes=30))
    assert index.add(ONE, [owned(9, b"other")]) == []
    assert index.add(ONE, [owned(number, b"tenant") for number in (1, 2, 3)]) == []
    find(index, ONE, 1)
    assert index.add(OTHER, [owned(4, b"tenant")]) == [(ONE, owned(2, b"tenant"))]
    assert index.add(ONE, [owned(1, b"tenant")]) == [], "what it has already takes no more room"
    assert find(index, ONE, 9, 1, 3) == [owned(9, b"other"), owned(1, b"tenant"), owned(3, b"tenant")]
    assert index.find(OTHER, keys(4)[0]) is not None
    index.drop(ONE, [owned(3, b"tenant")])
    assert index.add(ONE, [owned(5, b"tenant")]) == [], "what is gone makes room"


def test_no_more_is_thought_to_be_in_memory_than_it_has_room_for() -> None:
    index = MemoryIndex(IndexLimits(max_bytes=30))
    assert index.add(ONE, [owned(number, b"") for number in (1, 2, 3)]) == []
    find(index, ONE, 1)
    assert index.add(OTHER, [owned(4, b"")]) == [], "the store has evicted as much by itself"
    assert index.used_bytes == 30
    assert index.find(ONE, keys(2)[0]) is None
    assert find(index, ONE, 1, 3) == [owned(1, b""), owned(3, b"")]


shares = st.lists(st.tuples(st.sampled_from([b"", b"a", b"b"]), st.integers(0, 9), st.integers(1, 15)), max_size=40)


@given(shares)
def test_whatever_is_added_no_tenant_has_more_than_its_share(added: list[tuple[bytes, int, int]]) -> None:
    index, known = MemoryIndex(IndexLimits(tenant_bytes=30)), dict[bytes, StoredBlock]()
    for tenant, number, size in added:
        block = StoredBlock(bytes([number]), 0, size, tenant)
        known.pop(block.key, None)
        for _, gone in index.add(ONE, [block]):
            assert gone.tenant == tenant
            assert known.pop(gone.key) == gone
        known[block.key] = block
        assert all(index.find(ONE, key) == block for key, block in known.items())
        assert index.used_bytes == sum(block.size_bytes for block in known.values())
        assert sum(block.size_bytes for block in known.values() if block.tenant == tenant) <= 30


operations = st.tuples(st.sampled_from(["add", "drop", "run"]), st.lists(st.integers(0, 9), max_size=6))


@given(st.lists(operations, max_size=40))
def test_any_history_agrees_with_a_plain_set(history: list[tuple[str, list[int]]]) -> None:
    index, known = MemoryIndex(IndexLimits(max_blocks=100)), set[int]()
    for operation, numbers in history:
        if operation == "add":
            index.add(ONE, map(block, numbers))
            known.update(numbers)
        elif operation == "drop":
            index.drop(ONE, map(block, numbers))
            known.difference_update(numbers)
        else:
            found = [index.find(ONE, key) for key in keys(*numbers)]
            assert found == [block(number) if number in known else None for number in numbers]
        assert len(index) == len(known)


def test_used_bytes_are_those_of_the_blocks_that_are_known() -> None:
    now = 0.0
    index = MemoryIndex(IndexLimits(max_blocks=3, ttl_seconds=5.0), clock=lambda: now)
    index.add(ONE, [block(1), block(2), block(3)])
    index.add(ONE, [block(3, checksum=7), block(4)])
    assert index.used_bytes == 30
    index.drop(ONE, [block(4), block(3)])  # of 3 another copy is there
    assert index.used_bytes == 20
    now = 10.0
    assert index.find(ONE, keys(3)[0]) is None
    assert index.used_bytes == 10
    index.clear()
    assert index.used_bytes == 0
