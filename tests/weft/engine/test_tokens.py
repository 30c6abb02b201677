"""Greedy fp32 tokens are those of transformers, by whatever way the KV came about."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.weft.engine.harness import Driver, copy_blocks, hand_over, handed_off, prefill
from tests.weft.tiny_llama import Tiny
from weft.engine.runner import ModelRunner
from weft.engine.sampler import LaunchedStep
from weft.engine.step_scheduler import ScheduledChunk
from weft.model.config import read_config
from weft.request import FinishReason

NANO = Path(__file__).parents[3] / "models" / "weft-nano"
LENGTHS = [1, 2, 15, 16, 17, 32, 33, 64, 65, 100]


def prompts_of(lengths: list[int], vocab_size: int) -> list[list[int]]:
    """The same ones every time."""
    source = random.Random(4)
    return [[source.randrange(3, vocab_size) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("chunk_tokens", [16, 64])
def test_tokens_are_exact_cold_and_with_prefix_hits(tiny: Tiny, chunk_tokens: int) -> None:
    prompts = prompts_of(LENGTHS, tiny.config.vocab_size)
    expected = [tiny.greedy(prompt, 24) for prompt in prompts]
    assert all(len(set(tokens)) > 4 for tokens in expected), "the oracle's text is too dull to tell anything"
    with Driver(tiny, chunk_tokens=chunk_tokens) as driver:
        for turn in ("cold", "warm"):
            keys = [driver.submit(f"{turn}-{i}", prompt, 24) for i, prompt in enumerate(prompts)]
            ends = [driver.wait_end(key) for key in keys]
            assert [end.tokens for end in ends] == expected
            cached = [end.counts.num_cached_tokens for end in ends if end.counts]
            assert cached == [0 if turn == "cold" else (len(prompt) - 1) // 16 * 16 for prompt in prompts]
        driver.assert_all_blocks_are_back()


@pytest.mark.parametrize("chunk_tokens", [16, 64])
def test_tokens_are_exact_when_sequences_are_preempted(grouped: Tiny, chunk_tokens: int) -> None:
    prompts = prompts_of([30, 20, 33, 12, 16], grouped.config.vocab_size)
    expected = [grouped.greedy(prompt, 40) for prompt in prompts]
    with Driver(grouped, chunk_tokens=chunk_tokens, num_blocks=10) as driver:
        keys = [driver.submit(str(i), prompt, 40) for i, prompt in enumerate(prompts)]
        assert [driver.wait_end(key).tokens for key in keys] == expected
        driver.assert_all_blocks_are_back()
        assert driver.load.generated_tokens == 40 * len(prompts)


@pytest.mark.parametrize("chunk_tokens", [16, 64])
def test_tokens_are_exact_after_a_hand_off(tiny: Tiny, chunk_tokens: int) -> None:
    prompts = prompts_of(LENGTHS, tiny.config.vocab_size)
    with Driver(tiny, chunk_tokens=chunk_tokens) as source, Driver(tiny, chunk_tokens=chunk_tokens) as target:
        for number, prompt in enumerate(prompts):
            heard = handed_off(source, target, prompt, 20, str(number))
            assert heard.tokens == tiny.greedy(prompt, 20)
            assert heard.num_cached == len(prompt)
            assert heard.counts is not None
            assert heard.counts.compute_ms == 0
        source.assert_all_blocks_are_back()
        target.assert_all_blocks_are_back()
        assert target.load.computed_prompt_tokens == 0


@pytest.mark.parametrize("num_ready", [0, 16, 23, 48, 49])
def test_what_was_not_filled_is_computed_here(grouped: Tiny, num_ready: int) -> None:
    (prompt,) = prompts_of([49], grouped.config.vocab_size)
    with Driver(grouped) as source, Driver(grouped) as target:
        key = target.submit("a", prompt, 20, wait_for_kv=True)
        reserved = target.wait_reserved(key)
        _, lent = prefill(source, "a", prompt)
        hand_over(source, lent, target, reserved, len(prompt))
        target.engine.complete_kv(key, num_ready)
        heard = target.wait_end(key)
        assert heard.tokens == grouped.greedy(prompt, 20)
        assert heard.num_cached == min(num_ready, 48)
        assert target.load.computed_prompt_tokens == 49 - min(num_ready, 48)


def test_suspect_blocks_are_not_trusted_and_not_reused(grouped: Tiny) -> None:
    (prompt,) = prompts_of([70], grouped.config.vocab_size)
    with Driver(grouped) as source, Driver(grouped) as target:
        key = target.submit("a", prompt, 20, wait_for_kv=True)
        reserved = target.wait_reserved(key)
        first, (lent,) = prefill(source, "a", prompt)
        blocks = lent.blocks
        (run,) = reserved.page_ranges
        suspect = run.blocks[2:4]
        copy_blocks(source, (*blocks[:2], blocks[4]), target, (*run.blocks[:2], run.blocks[4]))
        target.engine.complete_kv(key, 70, first, suspect)
        heard = target.wait_end(key)
        assert heard.tokens == grouped.greedy(prompt, 20)
        assert heard.num_cached == 32
        assert target.load.quarantined_blocks == 2
        target.engine.unquarantine(suspect)
        target.wait(lambda: target.load.quarantined_blocks == 0)
        target.assert_all_blocks_are_back()


def test_a_suspect_that_cannot_be_replaced_sends_the_sequence_back_to_the_queue(grouped: Tiny) -> None:
    (prompt,) = prompts_of([40], grouped.config.vocab_size)
    with Driver(grouped, num_blocks=4) as driver:
        key = driver.submit("a", prompt, 5, wait_for_kv=True)
        reserved = driver.wait_reserved(key)
        driver.engine.complete_kv(key, 40, None, reserved.page_ranges[0].blocks)
        driver.wait(lambda: driver.load.quarantined_blocks == 3)
        assert driver.load.num_waiting == 1
        driver.engine.unquarantine(reserved.page_ranges[0].blocks)
        assert driver.wait_end(key).tokens == grouped.greedy(prompt, 5)
        driver.assert_all_blocks_are_back()


def test_a_second_turn_hits_the_blocks_of_the_answer_too(grouped: Tiny) -> None:
    (prompt,) = prompts_of([30], grouped.config.vocab_size)
    with Driver(grouped) as driver:
        first = driver.generate(prompt, 40)
        follow_up = prompt + first.tokens + [5, 6, 7]
        second = driver.generate(follow_up, 10, "two")
        assert second.tokens == grouped.greedy(follow_up, 10)
        assert second.num_cached == 64  # 69 tokens have KV: the last one of the answer has none


def test_another_salt_finds_nothing(grouped: Tiny) -> None:
    (prompt,) = prompts_of([40], grouped.config.vocab_size)
    with Driver(grouped) as driver:
        for salt, cached in ((b"a", 0), (b"b", 0), (b"a", 32)):
            heard = driver.generate(prompt, 2, salt.hex() + str(cached), cache_salt=salt)
            assert heard.num_cached == cached


def test_a_block_that_held_nan_does_not_spoil_its_next_owner(grouped: Tiny) -> None:
    (prompt,) = prompts_of([20], grouped.config.vocab_size)
    with Driver(grouped, num_blocks=3) as driver:
        driver.pool().fill_(float("nan"))
        assert driver.generate(prompt, 20).tokens == grouped.greedy(prompt, 20)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("chunk_tokens", [16, 64])
def test_tokens_are_exact_on_a_gpu(tiny: Tiny, chunk_tokens: int) -> None:
    prompts = prompts_of(LENGTHS, tiny.config.vocab_size)
    with Driver(tiny, device="cuda", chunk_tokens=chunk_tokens) as driver:
        keys = [driver.submit(str(i), prompt, 24) for i, prompt in enumerate(prompts)]
        assert [driver.wait_end(key).tokens for key in keys] == [tiny.greedy(prompt, 24) for prompt in prompts]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_launching_a_step_waits_for_nothing_on_a_gpu(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = ModelRunner.launch

    def strict(self: ModelRunner, chunks: Sequence[ScheduledChunk]) -> LaunchedStep:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(self, chunks)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    prompts = prompts_of(LENGTHS, tiny.config.vocab_size)
    with Driver(tiny, device="cuda", chunk_tokens=16) as driver:
        driver.generate(prompts[3], 24, "warm up")  # kernels are compiled, and read things back
        monkeypatch.setattr(ModelRunner, "launch", strict)
        sampled = {"temperature": 1.0, "top_p": 0.9, "num_logprobs": 2}
        keys = [driver.submit(str(i), prompt, 24, **(sampled if i % 2 else {})) for i, prompt in enumerate(prompts)]
        assert all(len(driver.wait_end(key).tokens) == 24 for key in keys)


def test_bf16_runs_and_agrees_with_itself(grouped: Tiny) -> None:
    prompts = prompts_of([1, 16, 50], grouped.config.vocab_size)
    with Driver(grouped, dtype="bfloat16") as driver:
        for number, prompt in enumerate(prompts):
            first = driver.generate(prompt, 12, f"cold-{number}")
            assert len(first.tokens) == 12
            assert first.reason is FinishReason.LENGTH
    with Driver(grouped, dtype="bfloat16") as driver:
        assert driver.generate(prompts[2], 12).tokens == first.tokens


@pytest.fixture(scope="module")
def nano() -> Tiny:
    """The model that ships."""
    oracle: Any = AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.float32)
    oracle.eval()
    return Tiny(oracle, NANO, read_config(NANO))


@pytest.mark.parametrize("chunk_tokens", [16, 64])
def test_tokens_of_the_shipped_model_are_exact(nano: Tiny, chunk_tokens: int) -> None:
    prompts = prompts_of([1, 16, 65, 200], nano.config.vocab_size)
    with Driver(nano, chunk_tokens=chunk_tokens) as driver:
        keys = [driver.submit(str(i), prompt, 16) for i, prompt in enumerate(prompts)]
        assert [driver.wait_end(key).tokens for key in keys] == [nano.greedy(prompt, 16) for prompt in prompts]
