"""Prefill sequences tell what is ready, end with one token and keep their blocks; sealed blocks are pinned."""

from __future__ import annotations

import pytest

from tests.weft.engine.harness import Driver, prefill
from tests.weft.tiny_llama import Tiny
from weft.engine.messages import SequenceMode
from weft.kv.block_pool import block_keys, tenant_tag
from weft.request import RequestKey, Retention

PROMPT = [3 + i % 100 for i in range(80)]


def test_progress_is_told_after_every_chunk_and_the_token_after_the_last(grouped: Tiny) -> None:
    with Driver(grouped, chunk_tokens=32) as driver:
        key = driver.submit("a", PROMPT, mode=SequenceMode.PREFILL)
        heard = driver.heard[key]
        driver.wait(lambda: bool(heard.tokens))
        assert [each.num_ready_tokens for each in heard.progress] == [32, 64, 80]
        assert len({each.page_ranges for each in heard.progress}) == 1
        assert len(heard.progress[0].page_ranges[0].blocks) == 5
        assert heard.tokens == grouped.greedy(PROMPT, 1)
        assert heard.reason is None
        assert heard.num_cached == 0


def test_hits_are_told_before_anything_is_computed(grouped: Tiny) -> None:
    with Driver(grouped, chunk_tokens=64) as driver:
        driver.generate(PROMPT[:50], 1, "earlier")
        key = driver.submit("a", PROMPT, mode=SequenceMode.PREFILL)
        heard = driver.heard[key]
        driver.wait(lambda: bool(heard.tokens))
        assert [each.num_ready_tokens for each in heard.progress] == [48, 80]
        assert heard.num_cached == 48


@pytest.mark.parametrize(("num_filled", "told"), [(64, [64, 80]), (80, [79, 80]), (0, [80])])
def test_a_prefill_that_waits_for_kv_computes_the_rest(grouped: Tiny, num_filled: int, told: list[int]) -> None:
    with Driver(grouped, chunk_tokens=128) as driver:
        key = driver.submit("a", PROMPT, mode=SequenceMode.PREFILL, wait_for_kv=True)
        assert driver.wait_reserved(key).num_hit_tokens == 0
        driver.engine.complete_kv(key, num_filled)
        heard = driver.heard[key]
        driver.wait(lambda: bool(heard.tokens))
        assert [each.num_ready_tokens for each in heard.progress] == told
        assert heard.num_cached == min(num_filled, 79)


def test_held_blocks_stay_until_released_and_are_cache_afterwards(grouped: Tiny) -> None:
    with Driver(grouped) as driver:
        prefill(driver, "a", PROMPT)
        driver.generate([5] * 20, 3, "other")
        assert driver.load.active_blocks == 5
        assert driver.load.num_running == 0
        driver.engine.release(RequestKey("a"))
        driver.assert_all_blocks_are_back()
        heard = driver.generate([*PROMPT, 9], 1, "again")
        assert heard.num_cached == 80


def test_a_prompt_that_waits_for_blocks_does_not_stop_those_who_run(grouped: Tiny) -> None:
    with Driver(grouped, num_blocks=8) as driver:
        prefill(driver, "held", PROMPT)
        running = driver.submit("running", [5] * 10, 30)
        waiting = driver.submit("waiting", PROMPT[::-1], mode=SequenceMode.PREFILL)
        assert driver.wait_end(running).tokens == grouped.greedy([5] * 10, 30)
        assert driver.heard[waiting].tokens == []
        driver.engine.release(RequestKey("held"))
        driver.wait(lambda: bool(driver.heard[waiting].tokens))
        assert driver.heard[waiting].tokens == grouped.greedy(PROMPT[::-1], 1)


def test_a_prefill_is_never_preempted(grouped: Tiny) -> None:
    driver = Driver(grouped, num_blocks=8, chunk_tokens=16)
    older = driver.submit("older", [5] * 10, 60)
    younger = driver.submit("younger", PROMPT, mode=SequenceMode.PREFILL)
    with driver:
        driver.wait(lambda: bool(driver.heard[younger].tokens))
        driver.wait(lambda: driver.load.num_waiting == 1)  # the older one, which found no fourth block
        assert driver.load.active_blocks == 5
        driver.engine.release(younger)
        assert driver.wait_end(older).tokens == grouped.greedy([5] * 10, 60)


def test_full_blocks_are_told_once_with_their_keys_and_stay_pinned_until_answered(grouped: Tiny) -> None:
    with Driver(grouped, pin_sealed=True) as driver:
        text = driver.generate(PROMPT, 20, "one", retention=Retention(60), cache_salt=b"acme").tokens
        driver.generate(PROMPT, 20, "two", cache_salt=b"acme")
        assert [each.block_key for each in driver.sealed] == block_keys(PROMPT + text[:-1], 16, b"acme")
        assert {(each.retention, each.tenant) for each in driver.sealed} == {(Retention(60), tenant_tag(b"acme"))}
        assert driver.load.active_blocks == len({each.block for each in driver.sealed}) == 6
        assert driver.load.active_tokens == 0
        driver.engine.unpin([each.block for each in driver.sealed])
        driver.assert_all_blocks_are_back()


def test_beyond_the_bound_blocks_are_published_and_told_when_others_are_answered(grouped: Tiny) -> None:
    keys = block_keys(PROMPT, 16)
    with Driver(grouped, pin_sealed=True, max_pinned=2) as driver:
        driver.generate(PROMPT, 2, "one", retention=Retention(60))
        assert [each.block_key for each in driver.sealed] == keys[:2]
        heard = driver.generate(PROMPT, 2, "two")
        assert heard.num_cached == 64
        driver.engine.unpin([driver.sealed[0].block])
        driver.wait(lambda: len(driver.sealed) == 3)
        driver.engine.unpin([each.block for each in driver.sealed[1:]])
        driver.wait(lambda: len(driver.sealed) == 5)
        assert [each.block_key for each in driver.sealed] == keys
        assert {each.retention for each in driver.sealed} == {Retention(60)}
        driver.engine.unpin([each.block for each in driver.sealed[3:]])
        driver.assert_all_blocks_are_back()


def test_blocks_that_went_before_their_turn_are_not_told(grouped: Tiny) -> None:
    others = PROMPT[::-1]
    with Driver(grouped, pin_sealed=True, max_pinned=1, num_blocks=7) as driver:
        driver.generate(PROMPT, 2, "one")
        driver.generate(others, 2, "two")  # in the place of all but the one that is pinned
        for num_told in range(1, 6):
            driver.engine.unpin([driver.sealed[-1].block])
            driver.wait(lambda count=num_told: len(driver.sealed) > count)  # type: ignore[misc]
        assert [each.block_key for each in driver.sealed] == [*block_keys(PROMPT, 16)[:1], *block_keys(others, 16)]
        driver.engine.unpin([driver.sealed[-1].block])
        driver.assert_all_blocks_are_back()


def test_filled_blocks_are_sealed_only_after_filled(grouped: Tiny) -> None:
    with Driver(grouped, pin_sealed=True) as driver:
        key = driver.submit("a", PROMPT, 2, wait_for_kv=True)
        driver.wait_reserved(key)
        early = driver.generate(PROMPT, 1, "early", cache_salt=b"")
        assert early.num_cached == 0
        assert len(driver.sealed) == 5
        other = driver.submit("b", PROMPT[::-1], 2, wait_for_kv=True)
        driver.wait_reserved(other)
        assert len(driver.sealed) == 5
        driver.engine.complete_kv(other, 32)
        driver.wait_end(other)
        assert [each.block_key for each in driver.sealed[5:]] == block_keys(PROMPT[::-1], 16)


def test_sealing_is_not_told_when_nobody_copies(grouped: Tiny) -> None:
    with Driver(grouped) as driver:
        driver.generate(PROMPT, 20)
        assert driver.sealed == []
        driver.assert_all_blocks_are_back()


def test_decoding_goes_on_while_a_long_prompt_is_computed(grouped: Tiny) -> None:
    with Driver(grouped, chunk_tokens=16) as driver:
        first = driver.submit("first", [5] * 4, 100)
        driver.wait(lambda: bool(driver.heard[first].tokens))
        prefill(driver, "long", PROMPT)
        num_chunks = len(driver.heard[RequestKey("long")].progress)
        assert num_chunks == 5
        assert len(driver.heard[first].tokens) >= 1 + num_chunks
