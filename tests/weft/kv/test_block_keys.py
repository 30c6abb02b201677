"""Block keys: equal exactly where tokens, everything before them, and the owner are equal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.kv.block_keys import KEY_BYTES, block_key, block_keys, reusable_blocks, root_key, tenant_tag

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


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
