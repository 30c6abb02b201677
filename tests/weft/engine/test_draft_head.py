"""A draft model in an engine drafts what it drafts over the whole text at once, and changes no text."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from random import Random
from typing import Any

import pytest
import torch

from tests.weft.engine.harness import Driver, handed_off
from tests.weft.engine.scripted import ScriptedSpeculator, reader_of
from tests.weft.engine.test_speculation import CASES, NUM_TOKENS, PROMPT, SIZES, Texts, assert_equal, prompt_of, submit
from tests.weft.engine.tiny_heads import MakeHead, SlowTwin, with_head
from tests.weft.tiny_llama import Tiny
from weft.engine.drafting.drafter import DraftRequest, DraftSource, Proposal
from weft.engine.sequence import Sequence
from weft.engine.step_scheduler import StepScheduler
from weft.request import NO_DRAFTS, SamplingParams

Drafted = tuple[tuple[int, ...], Proposal, SamplingParams]


class MixedSpeculator(ScriptedSpeculator):
    """Asks the head before every step, and verifies its drafts, scripted ones or none.

    `drafted`: texts, and what the head drafted after them.
    """

    def __init__(self, texts: dict[str, list[int]], max_drafts: int = 5, share_head: float = 0.4) -> None:
        super().__init__(reader_of(texts), share_right=0.8, is_varied=True)
        self.drafted: list[Drafted] = []
        self._max_drafts, self._share_head = max_drafts, share_head
        self._chance = Random(7)

    def propose(self, requests: Items[DraftRequest], num_prompt_rows: int) -> list[Proposal]:
        assert self.head is not None
        scripted = super().propose(requests, num_prompt_rows)
        if self._chance.random() < 0.3:
            return scripted
        asked = [each._replace(limit=min(each.limit, self._chance.randint(0, self._max_drafts))) for each in requests]
        found = self.head.draft(asked, lambda sequence, drafts: True)
        for (sequence, limit), proposal in zip(asked, found, strict=True):
            assert len(proposal) <= limit
            assert {draft.source for draft in proposal} <= {DraftSource.HEAD}
            if proposal:
                self.drafted.append((tuple(sequence.token_ids), proposal, sequence.spec.sampling))
        chosen = [
            drafts if drafts and self._chance.random() < self._share_head else other
            for drafts, other in zip(found, scripted, strict=True)
        ]
        self.proposed.update(zip((each.sequence for each in requests), chosen, strict=True))
        return chosen

    def forget(self, sequence: Sequence) -> None:
        super().forget(sequence)
        if self.head is not None:
            self.head.forget(sequence)


def assert_drafts_are_those_of(twin: SlowTwin, drafted: Items[Drafted], at_least: int = 20) -> None:
    assert len(drafted) >= at_least
    for token_ids, proposal, params in drafted:
        expected = twin.draft(token_ids, len(proposal), params)
        assert [draft.token_id for draft in proposal] == expected, f"after {len(token_ids)} tokens"


@pytest.fixture(scope="module")
def headed(tiny_of: Callable[[str], Tiny]) -> tuple[Tiny, MakeHead]:
    return with_head(tiny_of("grouped"))


@pytest.fixture(scope="module")
def twin(headed: tuple[Tiny, MakeHead]) -> SlowTwin:
    return SlowTwin(*headed)


@pytest.fixture(scope="module")
def plain(tiny_of: Callable[[str], Tiny]) -> Texts:
    """Each case alone, without drafts and without a head."""
    with Driver(tiny_of("grouped"), **SIZES) as driver:
        return {name: driver.wait_end(submit(driver, name)) for name in CASES}


def texts_of(plain: Texts) -> dict[str, list[int]]:
    return {name: prompt_of(name) + heard.tokens for name, heard in plain.items()}


@pytest.mark.parametrize("share_head", [0.4, 1.0])
def test_head_changes_no_text_in_a_batch(
    headed: tuple[Tiny, MakeHead], twin: SlowTwin, plain: Texts, share_head: float
) -> None:
    tiny, make_head = headed
    speculator = MixedSpeculator(texts_of(plain), share_head=share_head)
    with Driver(tiny, speculator=speculator, make_head=make_head, **{**SIZES, "chunk_tokens": 16}) as driver:
        keys = [submit(driver, name) for name in CASES]
        long = driver.submit("long", list(range(100)), 5)
        for key in keys:
            assert_equal(driver.wait_end(key), plain[key.request_id])
        driver.wait_end(long)
        driver.assert_all_blocks_are_back()
        assert sum((driver.heard[key].drafts for key in keys), NO_DRAFTS).accepted
    assert_drafts_are_those_of(twin, speculator.drafted, 100)
    assert not speculator.known


@pytest.mark.parametrize("chunk_tokens", [1, 3, 4, 7, 64])
def test_head_drafts_the_same_after_chunks_of_any_length(
    headed: tuple[Tiny, MakeHead], twin: SlowTwin, plain: Texts, chunk_tokens: int
) -> None:
    tiny, make_head = headed
    speculator = MixedSpeculator(texts_of(plain))
    sizes = {**SIZES, "chunk_tokens": chunk_tokens, "max_drafts": 7}
    with Driver(tiny, speculator=speculator, make_head=make_head, **sizes) as driver:
        heard = driver.generate(PROMPT, NUM_TOKENS)
    assert heard.drafts.verified or chunk_tokens == 1
    assert_drafts_are_those_of(twin, speculator.drafted, 0 if chunk_tokens == 1 else 10)


def test_head_drafts_the_same_behind_prefix_hits(headed: tuple[Tiny, MakeHead], twin: SlowTwin) -> None:
    tiny, make_head = headed
    speculator = MixedSpeculator({})
    with Driver(tiny, speculator=speculator, make_head=make_head, **SIZES) as driver:
        for length in range(9, 14):
            first = driver.generate(PROMPT[:length], 24, f"{length}")
            num_drafted = len(speculator.drafted)
            found = driver.generate(PROMPT[:length], 24, f"{length}", generation=1)
            assert found.num_cached == (length - 1) // 4 * 4
            assert found.tokens == first.tokens
            assert len(speculator.drafted) > num_drafted + 5
            start = PROMPT[:length] + first.tokens[:11]
            rest = driver.generate(start, 24, f"{length}", generation=2, resumed_tokens=11)
            assert rest.num_cached == (len(start) - 1) // 4 * 4
            assert first.tokens[:11] + rest.tokens == first.tokens
        driver.assert_all_blocks_are_back()
    assert_drafts_are_those_of(twin, speculator.drafted, 100)


@pytest.mark.parametrize("length", [11, 12, 13])
def test_head_drafts_the_same_behind_a_hand_off(headed: tuple[Tiny, MakeHead], twin: SlowTwin, length: int) -> None:
    """The prompt's own draft KV comes with the blocks; the feature of its last token is computed again."""
    tiny, make_head = headed
    speculator = MixedSpeculator({})
    with (
        Driver(tiny, make_head=make_head, **SIZES) as source,
        Driver(tiny, make_head=make_head, speculator=speculator, **SIZES) as target,
    ):
        expected = source.generate(PROMPT[:length], NUM_TOKENS, "alone")
        heard = handed_off(source, target, PROMPT[:length], NUM_TOKENS, "a", temperature=0.0)
        target.assert_all_blocks_are_back()
    assert heard.tokens == expected.tokens
    assert_drafts_are_those_of(twin, speculator.drafted, 10)


@pytest.mark.parametrize("num_blocks", [12, 18])
def test_head_drafts_the_same_under_preemption(
    headed: tuple[Tiny, MakeHead], twin: SlowTwin, plain: Texts, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    preempted: list[Sequence] = []
    preempt = StepScheduler._preempt

    def noted(self: StepScheduler, sequence: Sequence) -> None:
        preempted.append(sequence)
        preempt(self, sequence)

    monkeypatch.setattr(StepScheduler, "_preempt", noted)
    tiny, make_head = headed
    speculator = MixedSpeculator(texts_of(plain))
    names = ["temperature", "frequency", "grammar and penalties"]
    with Driver(
        tiny, speculator=speculator, make_head=make_head, **{**SIZES, "num_blocks": num_blocks, "max_num_seqs": 3}
    ) as driver:
        keys = [submit(driver, name) for name in names]
        for key in keys:
            assert driver.wait_end(key).tokens == plain[key.request_id].tokens
        driver.assert_all_blocks_are_back()
    assert preempted
    assert_drafts_are_those_of(twin, speculator.drafted, 10)


def test_sealed_blocks_do_not_depend_on_drafts(headed: tuple[Tiny, MakeHead], plain: Texts) -> None:
    """Bits of all blocks, target and draft layer, with no drafts, with the head's and with scripted ones."""
    tiny, make_head = headed
    found: list[dict[bytes, torch.Tensor]] = []
    for speculator in (None, MixedSpeculator({}, share_head=1.0), MixedSpeculator(texts_of(plain))):
        sizes: dict[str, Any] = {**SIZES, "pin_sealed": True, "max_pinned": 64}
        with Driver(tiny, speculator=speculator, make_head=make_head, **sizes) as driver:
            heard = driver.generate(prompt_of("greedy"), NUM_TOKENS, "greedy", num_logprobs=2)
            assert_equal(heard, plain["greedy"])
            blocks = driver.pool()
            found.append({each.block_key: blocks[each.block].clone() for each in driver.sealed})
    assert len(found[0]) >= 10
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        assert all(torch.equal(other[key], found[0][key]) for key in other)
