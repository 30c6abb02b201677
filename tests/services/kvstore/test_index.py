"""The index against the plainest model of itself, and its bound."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft_services.kvstore.index import BlockIndex, StoredBlock

ONE, OTHER = b"1" * 16, b"2" * 16


def block(number: int, checksum: int = 0) -> StoredBlock:
    return StoredBlock(bytes([number]), checksum, 10)


def keys(*numbers: int) -> list[bytes]:
    return [bytes([number]) for number in numbers]


def test_a_run_ends_at_the_first_unknown_key() -> None:
    index = BlockIndex()
    index.add(ONE, [block(1), block(2), block(4)])
    assert index.leading_run(ONE, keys(1, 2, 3, 4)) == [block(1), block(2)]
    assert index.leading_run(ONE, keys(3, 1)) == []
    assert index.leading_run(ONE, []) == []


def test_models_are_told_apart() -> None:
    index = BlockIndex()
    index.add(ONE, [block(1)])
    assert index.leading_run(OTHER, keys(1)) == []


def test_the_least_recently_matched_is_forgotten_first() -> None:
    index = BlockIndex(max_blocks=3)
    index.add(ONE, [block(1), block(2), block(3)])
    index.leading_run(ONE, keys(1))
    index.add(ONE, [block(4)])
    assert len(index) == 3
    assert index.leading_run(ONE, keys(2)) == []
    assert index.leading_run(ONE, keys(1, 3, 4)) == [block(1), block(3), block(4)]


def test_a_block_that_was_put_anew_is_not_dropped_for_the_old_one() -> None:
    index = BlockIndex()
    old, new = block(1, checksum=7), block(1, checksum=8)
    index.add(ONE, [old])
    index.add(ONE, [new])
    index.drop(ONE, [old])
    assert index.leading_run(ONE, keys(1)) == [new]
    index.drop(ONE, [new])
    assert len(index) == 0


operations = st.tuples(st.sampled_from(["add", "drop", "run"]), st.lists(st.integers(0, 9), max_size=6))


@given(st.lists(operations, max_size=40))
def test_any_history_agrees_with_a_plain_set(history: list[tuple[str, list[int]]]) -> None:
    index, known = BlockIndex(max_blocks=100), set[int]()
    for operation, numbers in history:
        if operation == "add":
            index.add(ONE, map(block, numbers))
            known.update(numbers)
        elif operation == "drop":
            index.drop(ONE, map(block, numbers))
            known.difference_update(numbers)
        else:
            run = index.leading_run(ONE, keys(*numbers))
            expected = next((place for place, number in enumerate(numbers) if number not in known), len(numbers))
            assert run == [block(number) for number in numbers[:expected]]
        assert len(index) == len(known)
