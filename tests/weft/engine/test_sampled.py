"""Noise of sampled text depends on seed, position and token alone; logprobs are the model's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.weft.engine.harness import Driver, hand_over, handed_off, prefill
from tests.weft.tiny_llama import Tiny

PROMPT = list(range(3, 43))
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.0, "seed": 5},
    "top-k and top-p": {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "seed": -7},
    "min-p": {"temperature": 0.8, "min_p": 0.02, "seed": 2**63 + 1},
}


@pytest.fixture(params=SETTINGS)
def sampling(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Ways to sample."""
    return SETTINGS[request.param]


def test_the_same_seed_gives_the_same_text_alone_and_in_a_batch(grouped: Tiny, sampling: dict[str, Any]) -> None:
    with Driver(grouped) as driver:
        alone = driver.generate(PROMPT, 24, **sampling).tokens
    with Driver(grouped, chunk_tokens=16) as driver:
        others = [driver.submit(f"other-{i}", PROMPT[: 3 + i], 40, temperature=1.0, seed=i) for i in range(6)]
        together = driver.generate(PROMPT, 24, **sampling).tokens
        different = driver.generate(PROMPT, 24, "different", **{**sampling, "seed": 6}).tokens
        for key in others:
            driver.wait_end(key)
    assert alone == together
    assert alone != different


def test_a_resumed_sequence_continues_the_same_text(grouped: Tiny, sampling: dict[str, Any]) -> None:
    with Driver(grouped) as driver:
        whole = driver.generate(PROMPT, 24, **sampling).tokens
    with Driver(grouped) as driver:
        rest = driver.generate(PROMPT + whole[:9], 24, resumed_tokens=9, **sampling).tokens
    assert whole[:9] + rest == whole


def test_a_preempted_sequence_continues_the_same_text(grouped: Tiny, sampling: dict[str, Any]) -> None:
    with Driver(grouped) as driver:
        whole = driver.generate(PROMPT, 40, **sampling).tokens
    with Driver(grouped, num_blocks=9) as driver:
        keys = [driver.submit(str(i), PROMPT, 40, cache_salt=bytes([i]), **sampling) for i in range(3)]
        assert [driver.wait_end(key).tokens for key in keys] == [whole] * 3


def test_a_handed_off_sequence_continues_the_same_text(grouped: Tiny, sampling: dict[str, Any]) -> None:
    with Driver(grouped) as source, Driver(grouped) as target:
        whole = source.generate(PROMPT, 24, "whole", **sampling).tokens
        assert handed_off(source, target, PROMPT, 24, **sampling).tokens == whole


@pytest.mark.parametrize("num_logprobs", [0, 4])
def test_logprobs_are_those_of_transformers(grouped: Tiny, num_logprobs: int) -> None:
    with Driver(grouped) as driver:
        heard = driver.generate(PROMPT, 12, temperature=2.0, seed=3, num_logprobs=num_logprobs)
    expected = grouped.logits(PROMPT + heard.tokens)[len(PROMPT) - 1 : -1].log_softmax(-1)
    assert len(heard.logprobs) == 12
    for row, token, found in zip(expected, heard.tokens, heard.logprobs, strict=True):
        assert found.chosen.token_id == token
        assert found.chosen.logprob == pytest.approx(row[token].item(), abs=1e-4)
        best = row.topk(num_logprobs)
        assert [each.token_id for each in found.top] == best.indices.tolist()
        torch.testing.assert_close(torch.tensor([each.logprob for each in found.top]), best.values, rtol=0, atol=1e-4)


def test_settings_out_of_all_bounds_harm_nobody(grouped: Tiny) -> None:
    wild = {"temperature": 1e30, "top_k": 2**70, "top_p": -1.0, "min_p": 9.0, "seed": 2**90, "num_logprobs": 10**6}
    with Driver(grouped) as driver:
        key = driver.submit("wild", PROMPT, 5, **wild)
        assert driver.generate(PROMPT, 12).tokens == grouped.greedy(PROMPT, 12)
        assert all(0 <= token < 131 for token in driver.wait_end(key).tokens)


def test_only_those_who_ask_get_logprobs(grouped: Tiny) -> None:
    with Driver(grouped) as driver:
        asking = driver.submit("asking", PROMPT, 5, num_logprobs=1)
        silent = driver.submit("silent", PROMPT, 5)
        assert len(driver.wait_end(asking).logprobs) == 5
        assert driver.wait_end(silent).logprobs == []


def test_the_first_token_of_a_prefill_brings_its_logprobs_along(grouped: Tiny) -> None:
    with Driver(grouped) as source, Driver(grouped) as target:
        key = target.submit("a", PROMPT, 3, wait_for_kv=True, num_logprobs=2)
        reserved = target.wait_reserved(key)
        first, lent = prefill(source, "a", PROMPT, num_logprobs=2)
        hand_over(source, lent, target, reserved, len(PROMPT))
        target.engine.complete_kv(key, len(PROMPT), first)
        heard = target.wait_end(key)
        assert len(heard.logprobs) == 3
        assert heard.logprobs[0] == first.logprobs
