"""An engine on several ranks says what an engine on one device says, whatever happens to its sequences."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.weft.engine.harness import Driver, Heard, handed_off
from tests.weft.engine.test_step_input import OddTokens
from tests.weft.groups.harness import GroupDriver
from tests.weft.groups.test_tensor_parallel import layouts_of
from tests.weft.tiny_families import TinyFamily
from weft.engine.drafting.speculator import AdaptiveSpeculator
from weft.request import RequestKey
from weft.worker.hidden_state_observers import PromptLogprobReader

Family = Callable[[str], TinyFamily]
# no two of these keep their KV alike
EDGES = ["llama2", "mistral-window", "qwen3-moe", "llama4", "deepseek", "gpt-oss", "gemma3"]
LENGTHS = [1, 7, 16, 17, 40]
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "seed": 11, "top_p": 0.95, "num_logprobs": 3},
    "penalties": {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.3, "presence_penalty": 0.4},
    "grammar": {"temperature": 1.0, "seed": 5},
}


# a step ahead, the leader sends tokens that it knows only when it sends them
CELLS = [(name, ahead) for name in EDGES for ahead in (0, 1)]


def prompt_of(length: int) -> list[int]:
    return [(5 * i * i + 3 * i + 7 * length) % 110 + 3 for i in range(length)]


def run(driver: Driver, num_tokens: int = 24) -> list[Heard]:
    """Generate in all ways at once, behind prompts of mixed lengths."""
    keys = []
    for name, sampling in WAYS.items():
        for length in LENGTHS:
            constraint = {"constraint": OddTokens()} if name == "grammar" else {}
            keys.append(driver.submit(f"{name} {length}", prompt_of(length), num_tokens, **sampling, **constraint))
    found = [driver.wait_end(key) for key in keys]
    driver.assert_all_blocks_are_back()
    return found


def assert_alike(found: list[Heard], expected: list[Heard]) -> None:
    assert [each.tokens for each in found] == [each.tokens for each in expected]
    assert [each.reason for each in found] == [each.reason for each in expected]
    for ours, theirs in zip(found, expected, strict=True):
        for mine, other in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert mine.chosen.logprob == pytest.approx(other.chosen.logprob, abs=1e-3)


@pytest.mark.parametrize(("name", "steps_ahead"), CELLS)
def test_a_group_generates_the_tokens_of_one_device(name: str, steps_ahead: int, family_of: Family) -> None:
    tiny = family_of(name)
    with Driver(tiny, device="cpu", chunk_tokens=16) as driver:
        expected = run(driver)
    layout = layouts_of(tiny.config)[0]
    with GroupDriver(tiny, layout, chunk_tokens=16, steps_ahead=steps_ahead) as driver:
        assert_alike(run(driver), expected)


def has_begun(driver: Driver, key: RequestKey) -> bool:
    return bool(driver.heard[key].tokens)


@pytest.mark.parametrize("name", EDGES)
def test_every_layout_survives_hits_preemption_and_cancelled_neighbours(name: str, family_of: Family) -> None:
    tiny = family_of(name)
    for layout in layouts_of(tiny.config):
        with Driver(tiny, device="cpu") as driver:
            expected = [driver.generate(prompt_of(40), 40).tokens, driver.generate(prompt_of(33), 40, "two").tokens]
        with GroupDriver(tiny, layout, num_blocks=24, max_num_seqs=3) as driver:
            assert driver.generate(prompt_of(40), 40, "first").tokens == expected[0]
            again = driver.submit("again", prompt_of(40), 40)
            gone = driver.submit("gone", prompt_of(39), 40)
            driver.wait(partial(has_begun, driver, gone))
            urgent = driver.submit("urgent", prompt_of(33), 40, priority=-1)
            driver.engine.cancel(gone)
            assert driver.wait_end(urgent).tokens == expected[1]
            assert driver.wait_end(again).tokens == expected[0]
            assert driver.heard[again].num_cached > 0
            driver.assert_all_blocks_are_back()


@pytest.mark.parametrize("name", EDGES)
def test_blocks_move_between_any_two_layouts(name: str, family_of: Family) -> None:
    """Hand-offs between engines, in both directions: pages hold the KV of the whole model, whoever computed it."""
    tiny = family_of(name)
    layouts = layouts_of(tiny.config)
    with Driver(tiny, device="cpu") as alone, Driver(tiny, device="cpu") as other:
        expected = other.generate(prompt_of(40), 24).tokens
        for number, layout in enumerate(layouts):
            with GroupDriver(tiny, layout) as group, GroupDriver(tiny, layouts[number - 1]) as neighbour:
                for source, target in ((alone, group), (group, neighbour), (neighbour, other)):
                    salt = f"{number} {source is alone} {target is other}"
                    assert (
                        handed_off(source, target, prompt_of(40), 24, salt, cache_salt=salt.encode()).tokens == expected
                    )


@pytest.mark.parametrize("name", ["llama2", "deepseek"])
def test_prompts_are_scored_on_all_ranks(name: str, family_of: Family) -> None:
    tiny, prompt = family_of(name), prompt_of(40)

    def scores(driver: Driver) -> list[float]:
        reader = PromptLogprobReader(tuple(prompt), 2)
        driver.generate(prompt, 1, "scored", observer=reader)
        return [each for piece in reader.found() for each in piece.chosen]

    with Driver(tiny, device="cpu") as driver:
        expected = scores(driver)
    with GroupDriver(tiny, layouts_of(tiny.config)[0]) as driver:
        assert scores(driver) == pytest.approx(expected, abs=1e-3)


def test_drafts_change_no_token(family_of: Family) -> None:
    tiny = family_of("llama2")
    prompt = prompt_of(12) * 3
    with Driver(tiny, device="cpu") as driver:
        expected = driver.generate(prompt, 60).tokens
    speculator = AdaptiveSpeculator(tiny.config.eos_token_ids)
    with GroupDriver(tiny, layouts_of(tiny.config)[0], speculator=speculator, max_drafts=7) as driver:
        heard = driver.generate(prompt, 60)
    assert heard.tokens == expected
    assert heard.drafts.verified > 0
