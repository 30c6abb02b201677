"""Drafts change the number of steps, and nothing else: text, logprobs and sealed blocks are those without drafts."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Any

import pytest

from tests.weft.engine.harness import Driver, Heard, handed_off
from tests.weft.engine.scripted import ScriptedSpeculator, reader_of
from tests.weft.engine.test_logits_processor import EveryThird
from tests.weft.tiny_llama import Tiny
from weft.capacity.draft import MIN_SAMPLED_ROWS
from weft.engine.config import EngineConfig
from weft.engine.draft_planner import ASK_STEPS
from weft.engine.drafting.drafter import DraftRequest, Proposal
from weft.engine.loop import Postprocessor
from weft.engine.messages import SequenceMode, SequenceSpec, StepOutput
from weft.engine.sequence import Sequence
from weft.engine.step_scheduler import SampledToken, StepScheduler
from weft.errors import ModelFailed
from weft.kv.block_pool import BlockPool
from weft.request import NO_DRAFTS, FinishReason, RequestKey, SamplingParams, Speculation

PROMPT = list(range(3, 43))
NUM_TOKENS = 40
END = 63
SIZES: dict[str, Any] = {"eos_token_ids": (END,), "block_tokens": 4, "num_blocks": 256}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"num_logprobs": 2},
    "temperature": {"temperature": 0.7, "seed": 5, "num_logprobs": 0},
    "top-p": {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "seed": -7},
    "min-p": {"temperature": 0.8, "min_p": 0.02, "seed": 2**63 + 1},
    "frequency": {"frequency_penalty": 1.5, "num_logprobs": 1},
    "presence": {"presence_penalty": 2.0, "temperature": 0.7, "seed": 2},
    "repetition": {"repetition_penalty": 1.8},
    "bias": {"logit_bias": ((7, 9.0), (90, -100.0)), "temperature": 1.0, "seed": 4},
    "min_tokens": {"ignore_eos": False, "min_tokens": 21, "logit_bias": ((END, 1000.0),), "eos": True},
    "grammar": {"temperature": 1.0, "seed": 9, "num_logprobs": 1, "constraint": EveryThird},
    "grammar and penalties": {"frequency_penalty": 0.7, "repetition_penalty": 1.3, "constraint": EveryThird},
}
# share of right drafts, and whether their number varies
DRAFTERS = {"right": (1.0, False), "random": (0.0, False), "mixed": (0.8, True)}
MAX_DRAFTS = {"right": 15, "random": 3, "mixed": 10}
Texts = dict[str, Heard]


def prompt_of(name: str) -> list[int]:
    """Prompts end at different places in a block. They are so short that all chunks of them give the same bits."""
    index = list(CASES).index(name)
    return [90 - index, *PROMPT[: 2 + index % 5]]


def submit(driver: Driver, name: str, num_tokens: int = NUM_TOKENS) -> RequestKey:
    fields = {key: value for key, value in CASES[name].items() if key != "eos"}
    if "constraint" in fields:
        fields["constraint"] = EveryThird(driver.config.vocab_size)
    return driver.submit(name, prompt_of(name), num_tokens, **fields)


@pytest.fixture(scope="module")
def plain(tiny_of: Callable[[str], Tiny]) -> Texts:
    """Each case alone, without drafts."""
    with Driver(tiny_of("grouped"), **SIZES) as driver:
        return {name: driver.wait_end(submit(driver, name)) for name in CASES}


def scripted(plain: Texts, drafter: str) -> ScriptedSpeculator:
    share_right, is_varied = DRAFTERS[drafter]
    texts = {name: prompt_of(name) + heard.tokens for name, heard in plain.items()}
    return ScriptedSpeculator(reader_of(texts), share_right, is_varied)


def assert_equal(heard: Heard, expected: Heard) -> None:
    assert (heard.tokens, heard.reason) == (expected.tokens, expected.reason)
    assert heard.logprobs == expected.logprobs


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_drafts_change_no_text_in_a_batch(grouped: Tiny, plain: Texts, drafter: str) -> None:
    speculator = scripted(plain, drafter)
    limits: dict[str, Any] = {**SIZES, "chunk_tokens": 16, "max_drafts": MAX_DRAFTS[drafter]}
    with Driver(grouped, **limits, speculator=speculator) as driver:
        keys = [submit(driver, name) for name in CASES]
        long = driver.submit("long", list(range(100)), 5)  # its chunks run next to drafts
        for key in keys:
            assert_equal(driver.wait_end(key), plain[key.request_id])
        driver.wait_end(long)
        driver.assert_all_blocks_are_back()
        counts = sum((driver.heard[key].drafts for key in keys), NO_DRAFTS)
    assert (counts.verified, counts.accepted) == (speculator.num_verified, speculator.num_accepted)
    assert 0 < counts.predicted < counts.verified
    assert not speculator.known
    if drafter == "right":
        # Fewer than 15 drafts, as the step's rows are limited too.
        assert counts.verified == counts.accepted > 3 * sum(len(step.outcomes) for step in speculator.steps)
        assert max(step.num_rows for step in speculator.steps) == MIN_SAMPLED_ROWS
        assert counts.predicted == counts.predicted_accepted
    else:
        assert counts.accepted < counts.verified


@pytest.mark.parametrize("name", CASES)
def test_drafts_change_no_text_of_a_sequence_alone(grouped: Tiny, plain: Texts, name: str) -> None:
    with Driver(grouped, **SIZES, speculator=scripted(plain, "mixed")) as driver:
        assert_equal(driver.wait_end(submit(driver, name)), plain[name])
        assert driver.heard[RequestKey(name)].drafts.accepted


@pytest.mark.parametrize("place", range(1, 9))
def test_stop_token_ends_the_sequence_at_any_place_of_a_step(grouped: Tiny, plain: Texts, place: int) -> None:
    prompt, text = prompt_of("greedy"), plain["greedy"].tokens
    stop = text[9 + place]
    assert stop not in text[: 9 + place]
    ends: dict[str, Any] = {"pin_sealed": True, "max_pinned": 64, **SIZES}
    for fields in ({"stop_token_ids": (stop,)}, {"ignore_eos": False}):
        heard: list[Heard] = []
        sealed: list[list[bytes]] = []
        for speculator in (None, scripted(plain, "right")):
            with Driver(grouped, speculator=speculator, **{**ends, "eos_token_ids": (stop,)}) as driver:
                heard.append(driver.generate(prompt, NUM_TOKENS, "greedy", num_logprobs=2, **fields))
                sealed.append([block.block_key for block in driver.sealed])
        assert_equal(heard[1], heard[0])
        assert (heard[1].tokens, heard[1].reason) == (text[: 10 + place], FinishReason.STOP)
        assert sealed[1] == sealed[0]


def test_max_tokens_and_context_end_a_sequence_that_drafts(grouped: Tiny, plain: Texts) -> None:
    prompt, text = prompt_of("greedy"), plain["greedy"].tokens
    with Driver(grouped, speculator=scripted(plain, "right"), **SIZES) as driver:
        for num_tokens in range(1, 19):
            heard = driver.generate(prompt, num_tokens, "greedy", generation=num_tokens)
            assert (heard.tokens, heard.reason) == (text[:num_tokens], FinishReason.LENGTH)
    for num_tokens in range(5, 14):
        room = len(prompt) + num_tokens
        with Driver(grouped, speculator=scripted(plain, "right"), **SIZES, max_context_tokens=room) as driver:
            heard = driver.generate(prompt, NUM_TOKENS, "greedy")
            assert (heard.tokens, heard.reason) == (text[:num_tokens], FinishReason.LENGTH)
            assert heard.drafts.accepted == heard.drafts.verified > 0


def test_drafts_change_no_text_behind_a_prefix_hit(grouped: Tiny) -> None:
    """Prompts of all lengths modulo a block, computed once without drafts and then found.

    Chunks are so short that with AVX2 too their rows give the bits of single rows.
    """
    prompts = {str(length): PROMPT[:length] for length in range(9, 14)}
    texts: dict[str, list[int]] = {}
    speculator = ScriptedSpeculator(reader_of(texts), share_right=0.8, is_varied=True)
    with Driver(grouped, speculator=speculator, **{**SIZES, "chunk_tokens": 7}) as driver:
        for name, prompt in prompts.items():
            off = Speculation(is_enabled=False)
            expected = driver.generate(prompt, 24, name, temperature=0.7, seed=3, num_logprobs=1, speculation=off)
            assert expected.drafts == NO_DRAFTS
            texts[name] = prompt + expected.tokens
            found = driver.generate(prompt, 24, name, generation=1, temperature=0.7, seed=3, num_logprobs=1)
            assert found.num_cached == (len(prompt) - 1) // 4 * 4
            assert found.drafts.accepted
            assert_equal(found, expected)
            # The answer's own blocks, sealed while it drafted, continue another one.
            start = prompt + found.tokens[:11]
            rest = driver.generate(start, 24, name, generation=2, temperature=0.7, seed=3, resumed_tokens=11)
            assert rest.num_cached == (len(start) - 1) // 4 * 4
            assert found.tokens[:11] + rest.tokens == expected.tokens
        driver.assert_all_blocks_are_back()


@pytest.mark.parametrize("name", ["greedy", "temperature", "frequency", "grammar"])
def test_drafts_change_no_text_behind_a_hand_off(grouped: Tiny, plain: Texts, name: str) -> None:
    fields = {**CASES[name], "num_logprobs": None, "constraint": None}
    with Driver(grouped, **SIZES) as alone:
        expected = alone.generate(prompt_of(name), NUM_TOKENS, name, **fields).tokens
    speculator = ScriptedSpeculator(reader_of({name: prompt_of(name) + expected}), share_right=0.8, is_varied=True)
    with Driver(grouped, **SIZES) as source, Driver(grouped, **SIZES, speculator=speculator) as target:
        heard = handed_off(source, target, prompt_of(name), NUM_TOKENS, name, **fields)
        target.assert_all_blocks_are_back()
    assert heard.tokens == expected
    assert heard.drafts.accepted


@pytest.mark.parametrize("num_blocks", [12, 18])
def test_drafts_change_no_text_under_preemption(
    grouped: Tiny, plain: Texts, num_blocks: int, preempted: list[Sequence]
) -> None:
    """Three sequences with room for one or less than two."""
    names = ["temperature", "frequency", "grammar and penalties"]
    speculator = scripted(plain, "mixed")
    with Driver(grouped, **{**SIZES, "num_blocks": num_blocks}, speculator=speculator) as driver:
        keys = [submit(driver, name) for name in names]
        for key in keys:
            assert driver.wait_end(key).tokens == plain[key.request_id].tokens
        driver.assert_all_blocks_are_back()
    assert preempted
    assert speculator.num_accepted


@pytest.mark.parametrize("num_spare", range(4))
def test_drafts_take_only_pages_beyond_the_reserve(num_spare: int) -> None:
    """Two sequences whose next drafts begin a page, where so many pages are free beyond one for each of them."""
    config = EngineConfig(num_blocks=4 + num_spare, block_tokens=4, vocab_size=100, max_context_tokens=16, max_drafts=5)
    pool, events = BlockPool(config.num_blocks), StepOutput()
    speculator = ScriptedSpeculator(lambda sequence, count: [1] * count)
    scheduler = StepScheduler(config, pool, speculator)
    postprocessor = Postprocessor(config, pool, scheduler, speculator)
    for name in ("one", "two"):
        spec = SequenceSpec(RequestKey(name), (1, 2, 3), SamplingParams(9), SequenceMode.GENERATE)
        scheduler.add(Sequence(spec, [1, 2, 3], 0.0))
    chunks = scheduler.schedule(events, 0.0, is_drained=True) or []
    postprocessor.apply(chunks, [[SampledToken(50)]] * 2, 0.1, events)
    chunks = scheduler.schedule(events, 0.0, is_drained=True) or []
    assert [len(chunk.drafts) for chunk in chunks] == [[0, 0], [4, 0], [5, 0], [5, 4]][num_spare]
    assert pool.num_available == 2
    # All drafts are wrong: the pages go back, but for those of the tokens to come.
    postprocessor.apply(chunks, [[SampledToken(60)] * chunk.num_samples for chunk in chunks], 0.1, events)
    assert sum(len(run.blocks) for each in scheduler.running for run in each.page_ranges) == 2 + [0, 1, 1, 2][num_spare]


def test_the_loop_ahead_asks_rarely_while_nothing_is_proposed(
    grouped: Tiny, plain: Texts, steps_ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    propose = ScriptedSpeculator.propose

    def noted(self: ScriptedSpeculator, requests: Items[DraftRequest], num_prompt_rows: int) -> list[Proposal]:
        asked.append(len(requests[0].sequence.token_ids))
        return propose(self, requests, num_prompt_rows)

    monkeypatch.setattr(ScriptedSpeculator, "propose", noted)
    with Driver(grouped, speculator=ScriptedSpeculator(reader_of({})), **SIZES) as driver:
        assert_equal(driver.generate(prompt_of("greedy"), NUM_TOKENS, "greedy", num_logprobs=2), plain["greedy"])
    # When the second token is scheduled, the loop ahead does not know the first one.
    first = len(prompt_of("greedy")) + 1
    expected = range(first + steps_ahead, first + NUM_TOKENS - 1, ASK_STEPS if steps_ahead else 1)
    assert asked == list(expected)


FAILED = SampledToken(12, failure=ModelFailed("non-finite logits"))
# drafts, what the rows sample, and what the sequence gains: tokens, accepted drafts, whether it fails
STEPS: dict[str, tuple[tuple[int, ...], tuple[int | SampledToken, ...], tuple[int, ...], int, bool]] = {
    "all right": ((12, 13), (12, 13, 14), (12, 13, 14), 2, False),
    "first wrong": ((12, 13), (20, 13, 14), (20,), 0, False),
    "second wrong": ((12, 13), (12, 20, 14), (12, 20), 1, False),
    "end accepted": ((12, END, 14), (12, END, 14, 15), (12, END), 2, False),
    "end sampled": ((12, 13, 14), (12, END, 14, 15), (12, END), 1, False),
    "failed row not reached": ((12, 12), (20, FAILED, 14), (20,), 0, False),
    "failed row reached": ((12, 12), (12, FAILED, 14), (12,), 1, True),
    "first row failed": ((12, 12), (FAILED, 12, 14), (), 0, True),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_keeps_tokens_up_to_the_first_wrong_draft(name: str) -> None:
    drafts, sampled, gained, num_accepted, fails = STEPS[name]
    config = EngineConfig(num_blocks=9, block_tokens=2, vocab_size=100, max_context_tokens=40, eos_token_ids=(END,))
    pool, events = BlockPool(config.num_blocks), StepOutput()
    speculator = ScriptedSpeculator(lambda sequence, count: drafts[:count])
    scheduler = StepScheduler(config, pool, speculator)
    postprocessor = Postprocessor(config, pool, scheduler, speculator)
    spec = SequenceSpec(RequestKey("one"), (1, 2, 3), SamplingParams(9), SequenceMode.GENERATE)
    sequence = Sequence(spec, [1, 2, 3], 0.0)
    scheduler.add(sequence)
    for tokens in ((11,), sampled):
        (chunk,) = scheduler.schedule(events, 0.0, is_drained=True) or []
        results = [each if isinstance(each, SampledToken) else SampledToken(each) for each in tokens]
        postprocessor.apply([chunk], [results], 0.1, events)
    assert len(chunk.drafts) == len(drafts)
    assert sequence.token_ids == [1, 2, 3, 11, *gained]
    assert sum((delta.token_ids for delta in events.deltas), ()) == (11, *gained)
    assert bool(events.failures) == fails
    assert (speculator.num_verified, speculator.num_accepted) == (len(drafts), num_accepted)
    assert [outcome.num_tokens for step in speculator.steps for outcome in step.outcomes] == [len(gained)]
    if gained:
        assert events.deltas[-1].drafts.accepted == num_accepted
        assert (events.deltas[-1].finish_reason is FinishReason.STOP) == (END in gained)
    # The last token has no KV yet, unless the sequence failed at the row behind it.
    num_computed = len(sequence.token_ids) - (not fails)
    assert sequence.num_computed == sequence.num_launched == num_computed
    assert sequence.num_sealed == num_computed // 2
    has_ended = fails or END in gained
    # The page of the sampled token may be missing yet, and there is none behind it.
    assert len(pool._refs) in ((0,) if has_ended else (-(-num_computed // 2), -(-len(sequence.token_ids) // 2)))
    assert bool(scheduler.live) == (not has_ended)
    scheduler.forget_ended()
    assert bool(speculator.known) == (not has_ended)
