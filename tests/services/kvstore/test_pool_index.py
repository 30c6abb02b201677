"""The index of workers' pools against the plainest model of itself, and over the wire."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft_services.kvstore import block_index
from weft_services.kvstore.block_index import SILENCE_SECONDS, SWEEP_BLOCKS, BlockReport, PoolIndex

ONE, OTHER = b"1" * 16, b"2" * 16


def key(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "little"), digest_size=32).digest()


def keys(numbers: Sequence[int]) -> list[bytes]:
    return [key(number) for number in numbers]


class Teller:
    """A worker as the index hears it."""

    def __init__(self, index: PoolIndex, name: str, fingerprint: bytes = ONE) -> None:
        self.index = index
        self.name = name
        self.boot_id = "boot-1"
        self.fingerprint = fingerprint
        self.sequence = 0

    def tell(self, stored: Sequence[int] = (), removed: Sequence[int] = (), is_snapshot: bool = False) -> bool:
        self.sequence += 1
        return self.index.report(
            BlockReport(
                *(self.name, self.boot_id, self.fingerprint, self.sequence, is_snapshot), keys(stored), keys(removed)
            )
        )


def located(index: PoolIndex, numbers: Sequence[int], fingerprint: bytes = ONE) -> dict[str, int]:
    return {match.worker_id: match.num_blocks for match in index.locate(fingerprint, keys(numbers))}


def swept(index: PoolIndex) -> int:
    return sum(1 for _ in index.sweep())


def test_each_worker_has_its_own_leading_run_and_the_longest_comes_first() -> None:
    index = PoolIndex()
    a, b, c = (Teller(index, name) for name in "abc")
    assert a.tell(range(5), is_snapshot=True)
    assert b.tell([0, 1, 2, 4, 5, 6, 7, 8], is_snapshot=True)
    assert c.tell([1, 2, 3], is_snapshot=True)
    assert located(index, range(9)) == {"a": 5, "b": 3}
    assert [match.worker_id for match in index.locate(ONE, keys(range(9)))] == ["a", "b"]
    assert located(index, range(9), OTHER) == {}
    assert b.tell([3], [0])
    assert located(index, range(9)) == {"a": 5}
    assert located(index, range(1, 9)) == {"a": 4, "b": 8, "c": 3}


def test_a_gap_or_another_start_is_not_understood_until_a_snapshot_comes() -> None:
    index = PoolIndex()
    worker = Teller(index, "a")
    assert not worker.tell([1]), "never heard of"
    assert worker.tell([1], is_snapshot=True)
    worker.sequence += 1  # one report was lost
    assert not worker.tell([2])
    assert located(index, [1]) == {}, "what is known may be wrong"
    assert worker.tell([2], is_snapshot=True)
    assert located(index, [2]) == {"a": 1}
    worker.boot_id = "boot-2"
    assert not worker.tell([3])
    assert worker.tell([3], is_snapshot=True)
    assert located(index, [2]) == {}
    assert [match.boot_id for match in index.locate(ONE, keys([3]))] == ["boot-2"]


def test_what_is_said_twice_changes_nothing() -> None:
    index = PoolIndex()
    worker = Teller(index, "a")
    assert worker.tell([1, 2], is_snapshot=True)
    assert worker.tell([], [2])
    worker.sequence -= 1
    assert worker.tell([2], [1])
    assert worker.tell([5], [])
    worker.sequence -= 2
    assert located(index, [1, 2]) == {"a": 1}


def test_who_falls_silent_is_forgotten_and_its_place_is_used_again() -> None:
    now = 0.0
    index = PoolIndex(clock=lambda: now)
    a, b = Teller(index, "a"), Teller(index, "b")
    assert a.tell(range(3 * SWEEP_BLOCKS), is_snapshot=True)
    assert b.tell(range(10), is_snapshot=True)
    now = SILENCE_SECONDS
    assert b.tell()
    now += 1
    assert swept(index) == 3, "a little at a time"
    assert len(index) == 10
    assert located(index, range(20)) == {"b": 10}
    assert not a.tell([1])
    assert a.tell([1], is_snapshot=True)
    assert located(index, [1]) == {"b": 1, "a": 1}


def test_no_more_than_the_bound_is_remembered() -> None:
    index = PoolIndex(max_blocks=10)
    a, b = Teller(index, "a"), Teller(index, "b")
    assert a.tell(range(25), is_snapshot=True)
    assert len(index) == 10
    assert b.tell(range(10), is_snapshot=True)
    assert located(index, range(25)) == {"a": 10, "b": 10}
    assert a.tell([30], [0, 1])
    assert b.tell([], [0])
    assert a.tell([31])
    assert located(index, [31]) == {"a": 1}


def test_sets_of_workers_that_no_block_has_any_more_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_index, "MAX_SETS", 100)
    index, dice = PoolIndex(), random.Random(5)
    held: dict[str, set[int]] = {str(number): set() for number in range(10)}
    tellers = {name: Teller(index, name) for name in held}
    assert all(teller.tell(is_snapshot=True) for teller in tellers.values())
    for _ in range(3000):
        name, number = dice.choice([*held]), dice.randrange(8)
        assert tellers[name].tell([], [number]) if number in held[name] else tellers[name].tell([number])
        held[name] ^= {number}
    assert len(index._models[ONE].sets) <= 101
    for number in range(8):
        assert located(index, [number]) == {name: 1 for name, numbers in held.items() if number in numbers}


events = st.tuples(
    st.sampled_from(["a", "b", "c"]),
    st.lists(st.integers(0, 12), max_size=5),
    st.lists(st.integers(0, 12), max_size=5),
    st.sampled_from(["news", "news", "news", "snapshot", "lost"]),
)


@given(st.lists(events, max_size=40), st.lists(st.integers(0, 12), max_size=13))
def test_any_history_agrees_with_plain_sets(
    history: list[tuple[str, list[int], list[int], str]], asked: list[int]
) -> None:
    index = PoolIndex()
    tellers = {name: Teller(index, name) for name in "abc"}
    held: dict[str, set[int]] = {}
    for name, stored, removed, kind in history:
        if kind == "lost":
            tellers[name].sequence += 1
            continue
        removed = [number for number in removed if number not in stored]
        if not tellers[name].tell(stored, removed, kind == "snapshot"):
            held.pop(name, None)
            continue
        base = set() if kind == "snapshot" else held[name]
        held[name] = (base - set(removed)) | set(stored)
        swept(index)
    expected = {
        name: next((place for place, number in enumerate(asked) if number not in numbers), len(asked))
        for name, numbers in held.items()
    }
    assert located(index, asked) == {name: count for name, count in expected.items() if count}
    swept(index)
    assert len(index) == len(set().union(*held.values()) if held else ())


@pytest.mark.parametrize("suffix", [b"", b"\1\0"])
def test_pages_of_groups_are_told_apart(suffix: bytes) -> None:
    index = PoolIndex()
    index.report(BlockReport("a", "boot", ONE, 1, True, [key(1) + suffix], []))
    assert [bool(index.locate(ONE, [key(1) + other])) for other in (b"", b"\1\0")] == [suffix == b"", suffix != b""]
