"""Every prompt token's logprob is that of transformers: in chunks, beside others, whatever is cached, preempted too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.weft.engine.harness import Driver
from tests.weft.tiny_families import TinyFamily
from tests.weft.tiny_llama import Tiny
from weft.engine.messages import SequenceMode
from weft.engine.sequence import Sequence
from weft.engine.step_scheduler import StepScheduler
from weft.errors import InvalidRequest
from weft.model.kv_layout import kv_groups
from weft.request import RequestKey
from weft.worker import hidden_state_observers
from weft.worker.hidden_state_observers import PromptLogprobReader

LENGTHS = [1, 2, 5, 16, 17, 70]
PROMPTS = [[(7 * i + 3 * length) % 100 + 3 for i in range(length)] for length in LENGTHS]
NUM_TOP = 3


def submit(driver: Driver, name: str, prompt: list[int], num_tokens: int, **changes: Any) -> PromptLogprobReader:
    scorer = PromptLogprobReader(prompt, NUM_TOP)
    driver.submit(name, prompt, num_tokens, observer=scorer, **changes)
    return scorer


def assert_scored(tiny: Tiny, prompt: list[int], scorer: PromptLogprobReader) -> None:
    """Against all logits at once."""
    pieces = scorer.found()
    expected = tiny.logits(prompt)[:-1].log_softmax(-1)
    chosen = [value for piece in pieces for value in piece.chosen]
    starts = [1 + sum(len(piece.chosen) for piece in pieces[:index]) for index in range(len(pieces))]
    assert [piece.start for piece in pieces] == starts
    own = expected.gather(-1, torch.tensor(prompt[1:], dtype=torch.int64)[:, None])
    torch.testing.assert_close(torch.tensor(chosen), own[:, 0], atol=1e-4, rtol=0)
    top = torch.tensor([value for piece in pieces for value in piece.top]).view(len(prompt) - 1, NUM_TOP)
    ids = torch.tensor([token for piece in pieces for token in piece.top_ids], dtype=torch.int64).view(-1, NUM_TOP)
    torch.testing.assert_close(top, expected.topk(NUM_TOP).values, atol=1e-4, rtol=0)
    torch.testing.assert_close(expected.gather(-1, ids), top, atol=1e-4, rtol=0)
    ranks = torch.tensor([rank for piece in pieces for rank in piece.ranks], dtype=torch.int64)
    assert ((expected > own + 1e-4).sum(-1) < ranks).all()
    assert ((expected > own - 1e-4).sum(-1) + 1 >= ranks).all()


@pytest.mark.parametrize("chunk_tokens", [1, 7, 128])
@pytest.mark.parametrize("name", ["qwen3", "mistral-window", "llama4", "deepseek"])
def test_logprobs_are_those_of_transformers(
    name: str, chunk_tokens: int, family_of: Callable[[str], TinyFamily]
) -> None:
    tiny = family_of(name)
    with Driver(tiny, num_blocks=64 * len(kv_groups(tiny.config).spans), chunk_tokens=chunk_tokens) as driver:
        text = driver.submit("text", PROMPTS[-1], 30)
        for turn in ("cold", "warm"):
            scorers = [submit(driver, f"{turn}-{i}", prompt, 3) for i, prompt in enumerate(PROMPTS)]
            for i, (prompt, scorer) in enumerate(zip(PROMPTS, scorers, strict=True)):
                heard = driver.wait_end(RequestKey(f"{turn}-{i}"))
                assert_scored(tiny, prompt, scorer)
                assert heard.tokens == tiny.greedy(prompt, 3)
                assert heard.num_cached == 0, "blocks hold no logits"
        assert driver.wait_end(text).tokens == tiny.greedy(PROMPTS[-1], 30), "those beside them go on as ever"
        after = driver.generate(PROMPTS[-1], 1, "after")
        assert after.num_cached >= 48, "what was computed is cached as ever"
        driver.assert_all_blocks_are_back()


def test_pieces_are_no_longer_than_they_have_to_be(grouped: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden_state_observers, "PIECE_TOKENS", 20)
    with Driver(grouped, chunk_tokens=7) as driver:
        scorer = submit(driver, "a", PROMPTS[-1], 1)
        driver.wait_end(RequestKey("a"))
        assert_scored(grouped, PROMPTS[-1], scorer)
        assert [len(piece.chosen) for piece in scorer.found()] == [21, 21, 21, 6]


def test_a_prefill_is_scored_as_well(grouped: Tiny) -> None:
    with Driver(grouped, chunk_tokens=16) as driver:
        scorer = submit(driver, "a", PROMPTS[-1], 1, mode=SequenceMode.PREFILL)
        driver.wait(lambda: bool(driver.heard[RequestKey("a")].tokens))
        assert_scored(grouped, PROMPTS[-1], scorer)


def test_a_prompt_that_makes_way_in_its_midst_is_scored_from_its_beginning(
    grouped: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    requeued: list[tuple[str, bool]] = []
    original = StepScheduler._preempt

    def requeue(self: StepScheduler, sequence: Sequence) -> None:
        requeued.append((sequence.spec.key.request_id, sequence.has_emitted))
        original(self, sequence)

    monkeypatch.setattr(StepScheduler, "_preempt", requeue)
    with Driver(grouped, num_blocks=6, chunk_tokens=7) as driver:
        urgent = driver.specify("urgent", PROMPTS[-1], 2, priority=1)
        began: list[bool] = []

        def cut_in(output: object) -> None:
            if not began and driver.engine.load.active_blocks:
                began.append(True)
                driver.engine.submit(urgent)

        driver.react = cut_in
        scorer = submit(driver, "a", PROMPTS[-1][::-1], 3)
        assert driver.wait_end(RequestKey("a")).tokens == grouped.greedy(PROMPTS[-1][::-1], 3)
        driver.wait_end(urgent.key)
        assert ("a", False) in requeued
        assert_scored(grouped, PROMPTS[-1][::-1], scorer)


def test_who_is_preempted_in_its_text_is_scored_once_and_finds_its_blocks(grouped: Tiny) -> None:
    with Driver(grouped, num_blocks=8, chunk_tokens=128) as driver:
        prompts = [[token + i for token in PROMPTS[-1][:40]] for i in range(2)]
        scorers = [submit(driver, f"{i}", prompt, 60) for i, prompt in enumerate(prompts)]
        for i, (prompt, scorer) in enumerate(zip(prompts, scorers, strict=True)):
            assert driver.wait_end(RequestKey(f"{i}")).tokens == grouped.greedy(prompt, 60)
            assert_scored(grouped, prompt, scorer)
            assert len(scorer.found()) == 1


def test_kv_from_elsewhere_tells_nothing_of_a_prompt(grouped: Tiny) -> None:
    with Driver(grouped) as driver, pytest.raises(InvalidRequest, match="hidden states"):
        submit(driver, "a", PROMPTS[1], 1, wait_for_kv=True)
