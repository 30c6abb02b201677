"""Means of a prompt's last hidden states are those of transformers, in chunks, beside others, whatever is cached."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.weft.engine.harness import Driver
from tests.weft.tiny_families import TinyFamily
from tests.weft.tiny_llama import Tiny
from weft.engine.messages import SequenceMode
from weft.errors import InvalidRequest
from weft.model.kv_layout import kv_groups
from weft.request import RequestKey
from weft.worker.hidden_state_observers import MeanPooling

LENGTHS = [1, 5, 16, 17, 70]
PROMPTS = [[(7 * i + 3 * length) % 100 + 3 for i in range(length)] for length in LENGTHS]


def expected(tiny: Tiny, prompt: list[int]) -> torch.Tensor:
    """By the oracle."""
    inner: Any = tiny.oracle
    with torch.inference_mode():
        output = inner(torch.tensor([prompt]), output_hidden_states=True)
    mean: torch.Tensor = output.hidden_states[-1][0].float().mean(0)
    return mean


def submit(driver: Driver, name: str, prompt: list[int]) -> tuple[RequestKey, MeanPooling]:
    reader = MeanPooling(len(prompt))
    return driver.submit(name, prompt, mode=SequenceMode.PREFILL, observer=reader), reader


def pooled(driver: Driver, key: RequestKey, reader: MeanPooling) -> torch.Tensor:
    driver.wait(lambda: bool(driver.heard[key].tokens))
    return torch.tensor(reader.mean())


@pytest.mark.parametrize("name", ["qwen3", "mistral-window", "qwen3-moe", "llama4", "deepseek"])
def test_means_are_those_of_transformers(name: str, family_of: Callable[[str], TinyFamily]) -> None:
    tiny = family_of(name)
    with Driver(tiny, num_blocks=64 * len(kv_groups(tiny.config).spans), chunk_tokens=16) as driver:
        text = driver.submit("text", PROMPTS[-1], 30)
        asked = [submit(driver, f"{turn}-{i}", prompt) for turn in ("cold", "warm") for i, prompt in enumerate(PROMPTS)]
        for (key, reader), prompt in zip(asked, PROMPTS * 2, strict=True):
            torch.testing.assert_close(pooled(driver, key, reader), expected(tiny, prompt), atol=2e-4, rtol=2e-3)
            assert driver.heard[key].num_cached == 0, "hidden states are in no cache"
            driver.engine.release(key)
        assert driver.wait_end(text).tokens == tiny.greedy(PROMPTS[-1], 30), "those beside them go on as ever"
        driver.assert_all_blocks_are_back()


def test_a_graph_step_is_not_taken_for_one_token_that_is_pooled(grouped: Tiny) -> None:
    with Driver(grouped, chunk_tokens=16, decode_graphs=True) as driver:
        text = driver.submit("text", PROMPTS[1], 20)
        found = pooled(driver, *submit(driver, "a", PROMPTS[0]))
        torch.testing.assert_close(found, expected(grouped, PROMPTS[0]), atol=2e-4, rtol=2e-3)
        assert driver.wait_end(text).tokens == grouped.greedy(PROMPTS[1], 20)


def test_as_many_rows_as_are_wanted_need_not_be_those(grouped: Tiny) -> None:
    """The pooled prompt's last row is wanted twice, and the first of the other prompt's two not at all."""
    driver = Driver(grouped, chunk_tokens=16)
    text = driver.submit("text", [5, 9], 6)
    asked = submit(driver, "a", PROMPTS[1])
    with driver:  # both are in its first step
        torch.testing.assert_close(pooled(driver, *asked), expected(grouped, PROMPTS[1]), atol=2e-4, rtol=2e-3)
        assert driver.wait_end(text).tokens == grouped.greedy([5, 9], 6)


def test_only_a_prompt_that_is_computed_here_can_be_pooled(grouped: Tiny) -> None:
    reader = MeanPooling(len(PROMPTS[1]))
    with Driver(grouped) as driver, pytest.raises(InvalidRequest, match="hidden states"):
        driver.submit("a", PROMPTS[1], mode=SequenceMode.PREFILL, observer=reader, wait_for_kv=True)
