"""Layers that see a window or a chunk keep no more than that: the tokens stay those of transformers, page by page."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tests.weft.engine.harness import Driver, hand_over, prefill
from tests.weft.engine.poison import Poison
from tests.weft.tiny_families import TinyFamily
from weft.capacity.layout import GPUS, Demand
from weft.capacity.plan import make_plan
from weft.model.kv_layout import kv_groups
from weft.model.sharding import Layout

NAMES = ["mistral-window", "qwen2-window", "llama4"]
LENGTHS = [1, 8, 23, 40, 57]
NUM_NEW = 64
Family = Callable[[str], TinyFamily]
Case = tuple[TinyFamily, list[list[int]], list[list[int]]]


@pytest.fixture(scope="module")
def cases(family_of: Family) -> Callable[[str], Case]:
    """A model, prompts of mixed lengths with a common beginning, and what transformers makes of them."""

    def make(name: str) -> Case:
        tiny = family_of(name)
        prompts = [[(5 * i * i + 3 * i + 7 * (i > 20) * length) % 110 + 3 for i in range(length)] for length in LENGTHS]
        return tiny, prompts, [tiny.greedy(prompt, NUM_NEW) for prompt in prompts]

    return cache(make)


@pytest.mark.parametrize("chunk_tokens", [1, 7, 16, 64])
@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_exact_with_every_page_poisoned_that_goes_back(
    name: str, chunk_tokens: int, cases: Callable[[str], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, prompts, expected = cases(name)
    # room for about two of the five: the others wait, are preempted, and take over pages that were others'
    num_blocks = 40 * len(kv_groups(tiny.config).spans)
    with Driver(tiny, block_tokens=4, chunk_tokens=chunk_tokens, num_blocks=num_blocks) as driver:
        poison = Poison(monkeypatch)
        poison.blocks = driver.pool().fill_(float("nan"))
        for turn in ("cold", "warm"):
            keys = [driver.submit(f"{turn}-{i}", prompt, NUM_NEW) for i, prompt in enumerate(prompts)]
            assert [driver.wait_end(key).tokens for key in keys] == expected
        driver.assert_all_blocks_are_back()
        assert poison.num_poisoned


@pytest.mark.parametrize("block_tokens", [4, 16])
@pytest.mark.parametrize("name", NAMES)
def test_a_hand_off_moves_what_the_next_token_sees_and_no_more(
    name: str, block_tokens: int, cases: Callable[[str], Case]
) -> None:
    tiny, prompts, expected = cases(name)
    limits: dict[str, Any] = {"block_tokens": block_tokens, "chunk_tokens": 16, "num_blocks": 256}
    with Driver(tiny, **limits) as source, Driver(tiny, **limits) as target:
        paging = target.engine.paging
        for number, prompt in enumerate(prompts):
            key = target.submit(str(number), prompt, NUM_NEW, wait_for_kv=True)
            reserved = target.wait_reserved(key)
            first, lent = prefill(source, str(number), prompt)
            moved = hand_over(source, lent, target, reserved, len(prompt))
            assert moved <= paging.num_pages(len(prompt) + 1)
            source.engine.release(key)
            target.engine.complete_kv(key, len(prompt), first)
            assert target.wait_end(key).tokens == expected[number]
        assert target.load.computed_prompt_tokens == 0
        source.assert_all_blocks_are_back()
        target.assert_all_blocks_are_back()


@pytest.mark.parametrize("name", NAMES)
def test_a_hand_off_that_fails_is_computed_here_from_the_found_prefix_on(
    name: str, cases: Callable[[str], Case]
) -> None:
    tiny, prompts, expected = cases(name)
    with Driver(tiny, block_tokens=4, chunk_tokens=16, num_blocks=256) as driver:
        for number, prompt in enumerate(prompts):
            driver.generate(prompt[:-1] or [3], 1, f"{number}-before")
            key = driver.submit(str(number), prompt, NUM_NEW, wait_for_kv=True)
            reserved = driver.wait_reserved(key)
            assert reserved.num_hit_tokens == (len(prompt) - 1) // 4 * 4 or len(prompt) % 4 == 1
            suspects = [run.blocks[-1] for run in reserved.page_ranges]
            driver.engine.complete_kv(key, reserved.num_hit_tokens, None, suspects)
            assert driver.wait_end(key).tokens == expected[number]
            driver.engine.unquarantine(suspects)
        driver.wait(lambda: driver.load.quarantined_blocks == 0)
        driver.assert_all_blocks_are_back()


@pytest.mark.parametrize("name", NAMES)
def test_a_second_turn_goes_on_from_pages_that_only_the_last_tokens_saw(
    name: str, cases: Callable[[str], Case]
) -> None:
    tiny, prompts, expected = cases(name)
    with Driver(tiny, block_tokens=4, num_blocks=256) as driver:
        driver.generate(prompts[3], NUM_NEW)
        follow_up = prompts[3] + expected[3] + [5, 6, 7]
        heard = driver.generate(follow_up, 10, "two")
        assert heard.tokens == tiny.greedy(follow_up, 10)
        # the last token of the answer has no KV
        assert heard.num_cached == (40 + NUM_NEW - 1) // 4 * 4


@pytest.mark.parametrize("num_prompt", [5, 24, 60])
@pytest.mark.parametrize("name", [*NAMES, "deepseek"])
def test_the_planners_bytes_are_those_that_a_sequence_really_takes(
    name: str, num_prompt: int, family_of: Family
) -> None:
    tiny = family_of(name)
    demand = Demand(GPUS["h200"], 1, 64, "float32", chunk_tokens=8, block_tokens=4)
    (stage,) = make_plan(tiny.config, Layout(), demand).stages
    with Driver(tiny, block_tokens=4, chunk_tokens=8, num_blocks=200) as driver:
        assert driver.engine.pool_memory.block_bytes == stage.page
        # up to a length at which a chunk of 8 is as full as it can be
        num_tokens = 80
        key = driver.submit("a", list(range(3, 3 + num_prompt)), num_tokens - num_prompt)
        most, most_generating = 0, 0
        heard = driver.heard[key]
        while heard.reason is None:
            driver.wait_step()
            most = max(most, driver.load.active_blocks)
            if len(heard.tokens) > 1 and heard.reason is None:
                most_generating = max(most_generating, driver.load.active_blocks)
        assert most_generating * stage.page == stage.kv_bytes_per_sequence(num_tokens)
        assert most <= stage.paging.max_pages(num_tokens)
