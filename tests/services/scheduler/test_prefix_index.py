"""Which worker is taken to hold what: found, touched, pushed out, forgotten; and never more than it can hold."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from weft_services.scheduler import prefixes
from weft_services.scheduler.prefixes import PrefixIndex


def chain(name: str, length: int) -> list[bytes]:
    return [f"{name}/{number}".encode() for number in range(length)]


def test_the_longest_prefix_of_each_holder_is_found() -> None:
    index: PrefixIndex[str] = PrefixIndex()
    shared, one, two = chain("s", 3), chain("a", 4), chain("b", 2)
    index.add("x", shared + one, 0, 100)
    index.add("y", shared + two, 0, 100)
    assert index.match(shared + one) == {"x": 7, "y": 3}
    assert index.match(shared + two + chain("c", 9)) == {"y": 5, "x": 3}
    assert index.match(chain("other", 3)) == {}


def test_a_long_prompt_is_found_whole_by_its_next_turn_and_nearly_whole_by_its_sibling() -> None:
    index: PrefixIndex[str] = PrefixIndex()
    prompt = chain("p", 1000)
    index.add("x", prompt, 0, 10_000)
    assert len(index) < 60
    assert index.match([*prompt, b"more"]) == {"x": 1000}
    found = index.match([*prompt[:700], b"else"])["x"]
    assert 700 * 7 / 8 - 1 <= found <= 700


def test_the_least_recently_used_goes_first_and_its_beginning_last() -> None:
    index: PrefixIndex[str] = PrefixIndex()
    old, new = chain("old", 6), chain("new", 6)
    index.add("x", old, 0, 10)
    index.add("x", new, 0, 10)
    assert index.match(new) == {"x": 6}
    assert index.match(old) == {"x": 4}
    index.add("x", old[:2], 2, 10)
    index.add("x", chain("third", 6), 0, 10)
    assert index.match(old) == {"x": 2}


def test_a_worker_that_leaves_is_forgotten_and_what_it_says_of_itself_counts() -> None:
    index: PrefixIndex[str] = PrefixIndex()
    index.add("x", chain("a", 4), 0, 10)
    index.add("y", chain("a", 4), 0, 10)
    index.remove("x", chain("a", 4)[2:])
    assert index.match(chain("a", 4)) == {"y": 4, "x": 2}
    index.trim("y", 1)
    assert index.match(chain("a", 4)) == {"x": 2, "y": 1}
    index.forget("x")
    assert index.match(chain("a", 4)) == {"y": 1}


def test_over_all_holders_it_is_bounded() -> None:
    index: PrefixIndex[str] = PrefixIndex(max_keys=50)
    for number in range(40):
        index.add(f"w{number % 4}", chain(str(number), 7), 0, 1000)
        assert len(index) <= 50
    assert index.match(chain("39", 7)) == {"w3": 7}


def test_a_newcomer_gets_its_part_of_a_full_index() -> None:
    index: PrefixIndex[str] = PrefixIndex(max_keys=600)
    for number in range(200):
        index.add("big", chain(f"big {number}", 6), 0, 10_000)
        index.add(f"small-{number % 8}", chain(f"small {number}", 2), 0, 10_000)
    for number in range(8):
        index.add("new", chain(f"new {number}", 6), 0, 10_000)
    assert len(index) == 600
    assert all(index.match(chain(f"new {number}", 6)) == {"new": 6} for number in range(8))
    assert all(index.match(chain(f"small {number}", 2)) for number in range(200)), "none of the small ones lost a key"


def test_over_the_bound_holders_come_to_hold_the_same() -> None:
    index: PrefixIndex[str] = PrefixIndex(max_keys=700)
    for number in range(3000):
        index.add("often" if number % 10 else f"seldom-{number % 60 // 10}", chain(str(number), 5), 0, 10_000)
        if number == 2000:
            index.forget("often")
    held = Counter(holder for number in range(3000) for holder in index.match(chain(str(number), 5)))
    assert len(held) == 7
    assert max(held.values()) <= 1.3 * min(held.values())


EVENTS = st.lists(
    st.tuples(st.sampled_from("xyz"), st.integers(0, 5), st.integers(0, 60), st.booleans()), min_size=1, max_size=30
)


@given(EVENTS)
def test_books_agree_whatever_happens(events: list[tuple[str, int, int, bool]]) -> None:
    index: PrefixIndex[str] = PrefixIndex(max_keys=120)
    for holder, name, length, leaves in events:
        keys = chain(str(name), length)
        index.add(holder, keys, index.match(keys).get(holder, 0), 40)
        if leaves:
            index.forget(holder)
            assert holder not in index.match(keys)
        elif length:
            assert index.match(keys).get(holder, 0) <= length
    for holder in "xyz":
        index.forget(holder)
    assert len(index) == 0
    assert all(not index.match(chain(str(name), 60)) for name in range(6))


def walked(index: PrefixIndex[str], keys: list[bytes]) -> dict[str, int]:
    """What `match` says, depth by depth and holder by holder."""
    found: dict[str, int] = {}
    last = 0
    for depth in (*prefixes._grid(len(keys)), len(keys) + 1):
        holders = {name for name in "xyz" if depth <= len(keys) and holds(index, name, keys[depth - 1])}
        if not holders:
            before = {name for name in "xyz" if last and holds(index, name, keys[last - 1])}
            for between in range(depth - 1, last, -1):
                here = {name for name in "xyz" if holds(index, name, keys[between - 1])}
                found |= {name: max(between, found.get(name, 0)) for name in here}
                if here and here == before:
                    break
            return found
        found |= dict.fromkeys(holders, depth)
        last = depth
    return found


def holds(index: PrefixIndex[str], holder: str, key: bytes) -> bool:
    return holder in index._held and key in index._held[holder].keys


@given(EVENTS)
def test_a_match_is_what_a_walk_finds(events: list[tuple[str, int, int, bool]]) -> None:
    index: PrefixIndex[str] = PrefixIndex(max_keys=120)
    asked = [chain(str(name), length) for name in range(6) for length in (0, 1, 9, 23, 60)]
    for holder, name, length, leaves in events:
        keys = chain(str(name), length)
        index.add(holder, keys, index.match(keys).get(holder, 0), 40)
        if leaves:
            index.forget(holder)
        for each in asked:
            assert index.match(each) == walked(index, each)
