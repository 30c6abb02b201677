"""Every family generates the tokens of transformers in the engine, by whatever way its KV came about."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import pytest

from tests.weft.engine.harness import Driver, handed_off
from tests.weft.tiny_families import FAMILIES, TinyFamily
from weft.engine.messages import StepOutput
from weft.engine.sequence import Sequence
from weft.engine.step_scheduler import StepScheduler
from weft.model import spec as model_spec
from weft.model.kv_layout import kv_groups
from weft.model.spec import Latent

LENGTHS = [1, 7, 16, 17, 40]
NUM_NEW, FEW_NEW = 64, 24
CHUNKS: list[dict[str, Any]] = [{"chunk_tokens": length} for length in (1, 7, 16, 64)]  # 64: more than any prompt has
# `make soak` generates 64 tokens in every way, `make test` in one of them, and a few in the others
IS_LONG = "WEFT_SOAK_STEPS" in os.environ
# no two of these keep their KV alike; hand-offs of the others are in tests/services/decode
EDGES = ["mistral-window", "qwen3-moe", "llama4", "deepseek"]
Family = Callable[[str], TinyFamily]


def with_loops(limits: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any], int]]:
    """Families with limits of the engine, each with one of the two loops: every pair of the three occurs.

    `make soak` takes every combination. Cases of one family are adjacent, so that one process usually runs them all.
    """
    every = product(enumerate(FAMILIES), enumerate(limits), (0, 1))
    return [(name, each, ahead) for (i, name), (j, each), ahead in every if IS_LONG or (i + j) % 2 == ahead]


@pytest.fixture(scope="module")
def cases(family_of: Family) -> Callable[[str], tuple[TinyFamily, list[list[int]], list[list[int]]]]:
    """A model, prompts of mixed lengths, and what transformers makes of them: ours, where it agrees."""

    def make(name: str) -> tuple[TinyFamily, list[list[int]], list[list[int]]]:
        tiny = family_of(name)
        prompts = [[(5 * i * i + 3 * i + 7 * length) % 110 + 3 for i in range(length)] for length in LENGTHS]
        with Driver(tiny) as driver:
            keys = [driver.submit(str(i), prompt, NUM_NEW) for i, prompt in enumerate(prompts)]
            expected = [driver.wait_end(key).tokens for key in keys]
        for prompt, tokens in zip(prompts, expected, strict=True):
            assert tiny.is_greedy(prompt, tokens)
        assert all(len(set(tokens)) > 4 for tokens in expected[1:]), "the oracle's text is too dull to tell anything"
        return tiny, prompts, expected

    return cache(make)


Cases = Callable[[str], tuple[TinyFamily, list[list[int]], list[list[int]]]]


@pytest.fixture
def preempted(monkeypatch: pytest.MonkeyPatch) -> list[Sequence]:
    """Sequences whose place was taken in the midst of their text, as often as it was."""
    found: list[Sequence] = []
    requeue = StepScheduler._preempt

    def watched(self: StepScheduler, sequence: Sequence) -> None:
        found.extend([sequence] * sequence.has_emitted)
        requeue(self, sequence)

    monkeypatch.setattr(StepScheduler, "_preempt", watched)
    return found


@pytest.mark.parametrize(("name", "limits", "steps_ahead"), with_loops(CHUNKS), ids=str, indirect=["steps_ahead"])
def test_tokens_are_exact_in_mixed_batches_with_preemption_in_mid_run(
    name: str, limits: dict[str, Any], cases: Cases, preempted: list[Sequence]
) -> None:
    """Three run at a time: two that matter more come when these are in the midst of their text, and take their place.

    Where layers see everything there are too few blocks as well, so that more make way later on.
    """
    tiny, prompts, expected = cases(name)
    count = NUM_NEW if IS_LONG or limits["chunk_tokens"] == 16 else FEW_NEW
    num_blocks = 10 * len(kv_groups(tiny.config).spans)
    with Driver(tiny, num_blocks=num_blocks, max_num_seqs=3, **limits) as driver:
        specs = [driver.specify(str(i), prompt, count, priority=i // 3) for i, prompt in enumerate(prompts)]
        late, told = specs[3:], list[int]()

        def submit_the_others(output: StepOutput) -> None:
            told.extend(token for delta in output.deltas for token in delta.token_ids)
            while late and len(told) >= FEW_NEW:
                driver.engine.submit(late.pop())

        driver.react = submit_the_others
        for spec in specs[:3]:
            driver.engine.submit(spec)
        assert [driver.wait_end(spec.key).tokens for spec in specs] == [tokens[:count] for tokens in expected]
        assert any(each.spec.priority == 0 for each in preempted)
        driver.assert_all_blocks_are_back()


@pytest.mark.parametrize(
    ("name", "limits", "steps_ahead"),
    with_loops([{"block_tokens": 8}, *([{"chunk_tokens": 7}] if IS_LONG else [])]),
    ids=str,
    indirect=["steps_ahead"],
)
def test_tokens_are_exact_in_mixed_batches_with_prefix_hits(name: str, limits: dict[str, Any], cases: Cases) -> None:
    tiny, prompts, expected = cases(name)
    count = NUM_NEW if IS_LONG else FEW_NEW
    with Driver(tiny, num_blocks=256, **limits) as driver:
        for turn in ("cold", "warm"):
            keys = [driver.submit(f"{turn}-{i}", prompt, count) for i, prompt in enumerate(prompts)]
            assert [driver.wait_end(key).tokens for key in keys] == [tokens[:count] for tokens in expected]
        assert driver.heard[keys[-1]].num_cached >= 32
        driver.assert_all_blocks_are_back()


@pytest.mark.parametrize("name", EDGES)
def test_blocks_that_held_nan_do_not_spoil_their_next_owners(
    name: str, cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Latent, "min_expanded_rows", 9)
    tiny, prompts, expected = cases(name)
    with Driver(tiny, num_blocks=10 * len(kv_groups(tiny.config).spans), chunk_tokens=16) as driver:
        driver.pool().fill_(float("nan"))
        keys = [driver.submit(str(i), prompt, FEW_NEW) for i, prompt in enumerate(prompts)]
        assert [driver.wait_end(key).tokens for key in keys] == [tokens[:FEW_NEW] for tokens in expected]


@pytest.mark.parametrize("workspace_bytes", [1, 20_000, 1 << 20])
@pytest.mark.parametrize("name", ["deepseek", "deepseek-plain"])
def test_tokens_are_exact_with_keys_made_for_long_chunks(
    name: str, workspace_bytes: int, cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_spec, "WORKSPACE_BYTES", workspace_bytes)
    monkeypatch.setattr(Latent, "min_expanded_rows", 3)
    tiny, prompts, expected = cases(name)
    with Driver(tiny, chunk_tokens=13) as driver:
        keys = [driver.submit(str(i), prompt, FEW_NEW) for i, prompt in enumerate(prompts)]
        assert [driver.wait_end(key).tokens for key in keys] == [tokens[:FEW_NEW] for tokens in expected]


@pytest.mark.parametrize("name", EDGES)
def test_tokens_are_exact_after_a_hand_off(name: str, cases: Cases) -> None:
    tiny, prompts, expected = cases(name)
    count = NUM_NEW if IS_LONG else FEW_NEW
    with Driver(tiny) as source, Driver(tiny) as target:
        for number, prompt in enumerate(prompts):
            heard = handed_off(source, target, prompt, count, str(number))
            assert heard.tokens == expected[number][:count]
        assert target.load.computed_prompt_tokens == 0
