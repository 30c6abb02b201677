"""Penalties, biases, min_tokens, constraints: the text of a slow loop over transformers, wherever it goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.weft.engine.harness import Driver, hand_over, handed_off, prefill
from tests.weft.tiny_llama import Tiny
from weft.errors import InvalidRequest
from weft.request import FinishReason

PROMPT = list(range(3, 43))
SETTINGS: dict[str, dict[str, Any]] = {
    "frequency": {"frequency_penalty": 1.5},
    "presence": {"presence_penalty": 2.0},
    "repetition": {"repetition_penalty": 1.8},
    "bias": {"logit_bias": ((7, 9.0), (90, -100.0))},
    "all of them": {
        "frequency_penalty": 0.7,
        "presence_penalty": -0.4,
        "repetition_penalty": 1.3,
        "logit_bias": ((11, 3.0),),
    },
}


class EveryThird:
    """Allows tokens whose number leaves the rest that the count of tokens so far demands."""

    def __init__(self, vocab_size: int, fails_at: int | None = None) -> None:
        self.accepted: list[int] = []
        self._vocab_size = vocab_size
        self._fails_at = fails_at

    def accept(self, token_ids: Sequence[int]) -> None:
        assert self.valid(token_ids) == len(token_ids), "drafts are validated before"
        self.accepted += token_ids

    def rollback(self, num_tokens: int) -> None:
        del self.accepted[len(self.accepted) - num_tokens :]

    def valid(self, token_ids: Sequence[int]) -> int:
        start = len(self.accepted)
        fitting = [token % 3 == at % 3 and token > 2 for at, token in enumerate(token_ids, start)]
        return (*fitting, False).index(False)

    def forced(self) -> list[int]:
        return []

    def fill(self, words: NDArray[np.int32]) -> None:
        for token in allowed_third(len(self.accepted), self._vocab_size):
            words.view(np.uint32)[token // 32] |= np.uint32(1 << (token % 32))

    @property
    def failure(self) -> str | None:
        return "too complex" if self._fails_at == len(self.accepted) else None


def allowed_third(num_generated: int, vocab_size: int) -> list[int]:
    return [token for token in range(3, vocab_size) if token % 3 == num_generated % 3]


def slow(tiny: Tiny, num_tokens: int, constrained: bool = False, **params: Any) -> list[int]:
    """Greedy text as the definitions have it, one full pass of transformers a token."""
    tokens = list(PROMPT)
    while len(tokens) < len(PROMPT) + num_tokens:
        generated = tokens[len(PROMPT) :]
        logits = tiny.logits(tokens)[-1].clone()
        for token, bias in params.get("logit_bias", ()):
            logits[token] += bias
        for token in set(tokens):
            factor = params.get("repetition_penalty", 1.0)
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        for token in set(generated):
            logits[token] -= params.get("presence_penalty", 0.0)
            logits[token] -= params.get("frequency_penalty", 0.0) * generated.count(token)
        if constrained:
            allowed = allowed_third(len(generated), len(logits))
            kept = torch.full_like(logits, float("-inf"))
            kept[allowed] = logits[allowed]
            logits = kept
        tokens.append(int(logits.argmax()))
    return tokens[len(PROMPT) :]


@pytest.mark.parametrize("params", SETTINGS.values(), ids=SETTINGS)
def test_text_is_that_of_the_slow_loop_in_a_batch_and_when_preempted(grouped: Tiny, params: dict[str, Any]) -> None:
    expected = slow(grouped, 30, **params)
    assert expected != grouped.greedy(PROMPT, 30)
    with Driver(grouped, num_blocks=9, chunk_tokens=16) as driver:
        keys = [driver.submit(str(i), PROMPT, 30, cache_salt=bytes([i]), **params) for i in range(3)]
        plain = driver.submit("plain", PROMPT, 30)
        assert [driver.wait_end(key).tokens for key in keys] == [expected] * 3
        assert driver.wait_end(plain).tokens == grouped.greedy(PROMPT, 30)


@pytest.mark.parametrize("params", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("num_resumed", [0, 9])
def test_text_goes_on_after_a_hand_off_and_elsewhere(grouped: Tiny, params: dict[str, Any], num_resumed: int) -> None:
    expected = slow(grouped, 20, **params)
    prompt = PROMPT + expected[:num_resumed]
    fields = {**params, "resumed_tokens": num_resumed}
    with Driver(grouped) as source, Driver(grouped) as target:
        assert expected[:num_resumed] + handed_off(source, target, prompt, 20, **fields).tokens == expected


def test_no_end_before_min_tokens_wherever_they_were_generated(grouped: Tiny) -> None:
    end = grouped.greedy(PROMPT, 1)[0]
    with Driver(grouped, eos_token_ids=(end,)) as driver:
        assert driver.generate(PROMPT, 20, "plain", ignore_eos=False).tokens == [end]
        # with the end token favoured beyond doubt, it comes as soon as it may
        wish: dict[str, Any] = {"ignore_eos": False, "min_tokens": 7, "logit_bias": ((end, 1000.0),)}
        whole = driver.generate(PROMPT, 20, "whole", **wish)
        assert (len(whole.tokens), whole.reason) == (8, FinishReason.STOP)
        rest = driver.generate(PROMPT + whole.tokens[:5], 20, "rest", resumed_tokens=5, **wish)
        assert rest.tokens == whole.tokens[5:]
        # a stop token is an end too
        stop = {"min_tokens": 3, "stop_token_ids": (end,), "logit_bias": ((end, 1000.0),)}
        assert len(driver.generate(PROMPT, 20, "stop", **stop).tokens) == 4


def test_a_constraint_holds_from_the_first_token_through_preemption_and_hand_off(grouped: Tiny) -> None:
    size = grouped.config.vocab_size
    expected = slow(grouped, 30, constrained=True)
    with Driver(grouped, num_blocks=9, chunk_tokens=16) as driver:
        keys = [driver.submit(str(i), PROMPT, 30, cache_salt=bytes([i]), constraint=EveryThird(size)) for i in range(3)]
        assert [driver.wait_end(key).tokens for key in keys] == [expected] * 3
    with Driver(grouped) as source, Driver(grouped) as target:
        prompt = PROMPT + expected[:8]
        key = target.submit("a", prompt, 30, wait_for_kv=True, resumed_tokens=8, constraint=EveryThird(size))
        reserved = target.wait_reserved(key)
        first, lent = prefill(source, "a", prompt, resumed_tokens=8, constraint=EveryThird(size))
        assert first.token_id == expected[8]
        hand_over(source, lent, target, reserved, len(prompt))
        target.engine.complete_kv(key, len(prompt), first)
        assert expected[:8] + target.wait_end(key).tokens == expected


class Recited:
    """Allows one text, then `end` and nothing more."""

    failure: str | None = None

    def __init__(self, text: Sequence[int], end: int) -> None:
        self._left = [*text, end]

    def accept(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            if token != self._left.pop(0) or not self._left:
                self.failure = "nothing can follow"

    def fill(self, words: NDArray[np.int32]) -> None:
        words.view(np.uint32)[self._left[0] // 32] |= np.uint32(1 << (self._left[0] % 32))


@pytest.mark.parametrize("wish", [{"min_tokens": 9}, {"ignore_eos": True}, {"temperature": 1.0, "min_tokens": 9}])
def test_a_grammar_that_is_complete_ends_the_answer_whoever_wants_more(grouped: Tiny, wish: dict[str, Any]) -> None:
    text, end = [60, 31, 7], 63
    with Driver(grouped, eos_token_ids=(end,)) as driver:
        heard = driver.generate(PROMPT, 20, constraint=Recited(text, end), **{"ignore_eos": False, **wish})
        assert (heard.tokens, heard.reason) == ([*text, end], FinishReason.STOP)


def test_a_grammar_that_can_go_on_does_so_until_min_tokens(grouped: Tiny) -> None:
    size, end = grouped.config.vocab_size, 63
    wish: dict[str, Any] = {"ignore_eos": False, "min_tokens": 7, "logit_bias": ((end, 1000.0),)}
    with Driver(grouped, eos_token_ids=(end,)) as driver:
        heard = driver.generate(PROMPT, 20, constraint=EveryThird(size), **wish)
        # 63 may come wherever multiples of three may
        assert (len(heard.tokens), heard.tokens[-1], heard.reason) == (10, end, FinishReason.STOP)


def test_a_constraint_that_fails_ends_its_own_sequence_only(grouped: Tiny) -> None:
    with Driver(grouped) as driver:
        other = driver.submit("other", PROMPT, 30)
        failing = driver.submit("failing", PROMPT, 30, constraint=EveryThird(grouped.config.vocab_size, fails_at=4))
        driver.wait(lambda: driver.heard[failing].failure is not None)
        failure = driver.heard[failing].failure
        assert failure is not None
        assert isinstance(failure.error, InvalidRequest)
        assert str(failure.error) == "too complex"
        assert len(driver.heard[failing].tokens) == 4
        assert driver.wait_end(other).tokens == grouped.greedy(PROMPT, 30)
        driver.assert_all_blocks_are_back()
