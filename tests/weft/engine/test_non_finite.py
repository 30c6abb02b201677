"""Logits that are no numbers, of damaged weights or sums that overflow, end the sequence that has them and no other."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.weft.engine.harness import Driver, Heard
from tests.weft.tiny_llama import Tiny
from weft.errors import ModelFailed
from weft.request import RequestKey
from weft_kernels.sampling import max_logits

BROKEN, GOOD = 90, list(range(3, 43))
SAMPLED = {"temperature": 1.0, "seed": 7}


def with_row(tiny: Tiny, name: str, row: int, value: float) -> Tiny:
    """The model with another row in one matrix."""
    oracle = copy.deepcopy(tiny.oracle)
    with torch.no_grad():
        oracle.get_parameter(name)[row] = value
    return replace(tiny, oracle=oracle)


def failed(driver: Driver, key: RequestKey) -> Heard:
    heard = driver.heard[key]
    driver.wait(lambda: heard.failure is not None or heard.reason is not None)
    assert heard.failure is not None
    assert isinstance(heard.failure.error, ModelFailed)
    assert "non-finite logits" in str(heard.failure.error)
    return heard


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [{}, SAMPLED, {"num_logprobs": 2}, {"presence_penalty": 1.0}])
def test_a_sequence_with_non_finite_logits_fails_alone(grouped: Tiny, value: float, sampling: dict[str, Any]) -> None:
    assert not grouped.config.is_tied
    with Driver(grouped) as driver:
        expected = driver.generate(GOOD, 8, **sampling)
    with Driver(with_row(grouped, "model.embed_tokens.weight", BROKEN, value)) as driver:
        good = driver.submit("good", GOOD, 8, **sampling)
        bad = driver.submit("bad", [5, BROKEN, 6], 8, **sampling)
        assert failed(driver, bad).tokens == []
        assert driver.wait_end(good).tokens == expected.tokens
        assert driver.generate(GOOD, 8, name="later", **sampling).tokens == expected.tokens


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [{}, SAMPLED, {"top_k": 4, **SAMPLED}, {"logit_bias": ((BROKEN, -100.0),)}])
def test_one_non_finite_logit_is_enough(grouped: Tiny, value: float, sampling: dict[str, Any]) -> None:
    with Driver(with_row(grouped, "lm_head.weight", BROKEN, value)) as driver:
        failed(driver, driver.submit("bad", GOOD, 8, **sampling))
        assert driver.engine.is_alive


class Nothing:
    """A constraint that allows no token."""

    failure = None

    def accept(self, token_ids: Any) -> None:
        pass

    def fill(self, words: Any) -> None:
        pass


def test_a_mask_that_leaves_no_token_fails(grouped: Tiny) -> None:
    with Driver(grouped) as driver:
        heard = failed(driver, driver.submit("bad", GOOD, 8, constraint=Nothing()))
        assert heard.failure is not None
        assert "leave no token" in str(heard.failure.error)
        driver.generate(GOOD, 2, name="good")


def test_tops_are_non_finite_where_any_logit_is() -> None:
    logits = torch.tensor([[0.0, 1.0], [math.nan, 1.0], [math.inf, 0.0], [-math.inf, 0.0], [-math.inf, -math.inf]])
    assert max_logits(logits).isfinite().tolist() == [True, False, False, True, False]
