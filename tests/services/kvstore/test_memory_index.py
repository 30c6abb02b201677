"""The index against the plainest model of itself, and its bound."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from weft.request import Retention
from weft_services.kvstore.block_index import IndexLimits, MemoryIndex, StoredBlock

ONE, OTHER = b"1" * 16, b"2" * 16


def block(number: int, checksum: int = 0) -> StoredBlock:
    return StoredBlock(bytes([number]), checksum, 10)


def keys(*numbers: int) -> list[bytes]:
    return [bytes([number]) for number in numbers]


def leading_run(index: MemoryIndex, fingerprint: bytes, keys: list[bytes]) -> list[StoredBlock]:
    found = [index.find(fingerprint, key) for key in keys]
    return [block for block in found[: found.index(None) if None in found else len(found)] if block is not None]


def test_a_run_ends_at_the_first_unknown_key() -> None:
    index = MemoryIndex()
    index.add(ONE, [block(1), block(2), block(4)])
    assert leading_run(index, ONE, keys(1, 2, 3, 4)) == [block(1), block(2)]
    assert leading_run(index, ONE, keys(3, 1)) == []
    assert leading_run(index, ONE, []) == []


def test_models_are_told_apart() -> None:
    index = MemoryIndex()
    index.add(ONE, [block(1)])
    assert leading_run(index, OTHER, keys(1)) == []


def test_the_least_recently_matched_is_forgotten_first() -> None:
    index = MemoryIndex(IndexLimits(max_blocks=3))
    index.add(ONE, [block(1), block(2), block(3)])
    leading_run(index, ONE, keys(1))
    index.add(ONE, [block(4)])
    assert len(index) == 3
    assert leading_run(index, ONE, keys(2)) == []
    assert leading_run(index, ONE, keys(1, 3, 4)) == [block(1), block(3), block(4)]


def test_a_block_that_was_put_anew_is_not_dropped_for_the_old_one() -> None:
    index = MemoryIndex()
    old, new = block(1, checksum=7), block(1, checksum=8)
    index.add(ONE, [old])
    index.add(ONE, [new])
    index.drop(ONE, [old])
    assert leading_run(index, ONE, keys(1)) == [new]
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


def test_a_block_is_not_found_after_its_time() -> None:
    now = 1000.0
    index = MemoryIndex(IndexLimits(ttl_seconds=60), clock=lambda: now)
    index.add(ONE, [StoredBlock(b"k", 1, 10, stored_at=1000.0)])
    now = 1060.0
    assert index.find(ONE, b"k") is not None
    now = 1060.5
    assert index.find(ONE, b"k") is None
    assert len(index) == 0


def test_a_block_with_a_time_of_its_own_is_found_until_nobody_has_asked_for_it_so_long() -> None:
    now = 1000.0
    index = MemoryIndex(steady=lambda: now)
    index.add(ONE, [StoredBlock(b"k", 1, 10, retention=Retention(60)), StoredBlock(b"other", 1, 10)])
    for moment in (1050.0, 1110.0, 1170.0):
        now = moment
        assert index.find(ONE, b"k") is not None, "each use begins its time anew"
    now = 1230.5
    assert index.find(ONE, b"k") is None
    assert index.find(ONE, b"other") is not None


def test_a_clock_that_is_set_does_not_change_how_long_ago_a_use_was() -> None:
    wall, now = 1000.0, 5.0
    index = MemoryIndex(clock=lambda: wall, steady=lambda: now)
    index.add(ONE, [StoredBlock(b"k", 1, 10, stored_at=wall, retention=Retention(60))])
    for moment in (1e9, 0.0):
        wall = moment
        assert index.find(ONE, b"k") is not None
    now = 66.0
    assert index.find(ONE, b"k") is None


def test_uses_do_not_extend_what_the_store_allows() -> None:
    now = 0.0
    index = MemoryIndex(IndexLimits(ttl_seconds=100), clock=lambda: now, steady=lambda: now)
    index.add(ONE, [StoredBlock(b"k", 1, 10, retention=Retention(60))])
    for moment in (50.0, 100.0):
        now = moment
        assert index.find(ONE, b"k") is not None
    now = 100.5
    assert index.find(ONE, b"k") is None


def owned(number: int, tenant: bytes) -> StoredBlock:
    return StoredBlock(bytes([number]), 0, 10, tenant)


def test_a_tenant_over_its_share_loses_what_it_used_least_recently_and_nobody_else_loses_anything() -> None:
    index = MemoryIndex(IndexLimits(tenant_bytes=30))
    assert index.add(ONE, [owned(9, b"other")]) == []
    assert index.add(ONE, [owned(number, b"tenant") for number in (1, 2, 3)]) == []
    leading_run(index, ONE, keys(1))
    assert index.add(OTHER, [owned(4, b"tenant")]) == [(ONE, owned(2, b"tenant"))]
    assert index.add(ONE, [owned(1, b"tenant")]) == [], "what it has already takes no more room"
    assert leading_run(index, ONE, keys(9, 1, 3)) == [owned(9, b"other"), owned(1, b"tenant"), owned(3, b"tenant")]
    assert index.find(OTHER, keys(4)[0]) is not None
    index.drop(ONE, [owned(3, b"tenant")])
    assert index.add(ONE, [owned(5, b"tenant")]) == [], "what is gone makes room"


def test_no_more_is_thought_to_be_in_memory_than_it_has_room_for() -> None:
    index = MemoryIndex(IndexLimits(max_bytes=30))
    assert index.add(ONE, [owned(number, b"") for number in (1, 2, 3)]) == []
    leading_run(index, ONE, keys(1))
    assert index.add(OTHER, [owned(4, b"")]) == [], "the store has evicted as much by itself"
    assert index.used_bytes == 30
    assert index.find(ONE, keys(2)[0]) is None
    assert leading_run(index, ONE, keys(1, 3)) == [owned(1, b""), owned(3, b"")]


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
