"""A draft model in an engine drafts what it drafts over the whole text at once, and changes no text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.weft.engine.harness import Driver, handed_off
from tests.weft.engine.poison import Poison
from tests.weft.engine.test_speculation import CASES, NUM_TOKENS, PROMPT, SIZES, Texts, assert_equal, prompt_of, submit
from tests.weft.engine.tiny_heads import MakeHead, MixedSpeculator, SlowTwin, assert_drafts_are_those_of, with_head
from tests.weft.tiny_families import TinyFamily
from tests.weft.tiny_llama import Tiny
from weft.engine.sequence import Sequence
from weft.kv.block_pool import plain_key
from weft.model.kv_layout import kv_groups
from weft.request import NO_DRAFTS


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
    assert_drafts_are_those_of(twin, speculator.drafted, 50)
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
    texts: dict[str, list[int]] = {}
    speculator = MixedSpeculator(texts)
    with Driver(tiny, speculator=speculator, make_head=make_head, **SIZES) as driver:
        for length in range(9, 14):
            first = driver.generate(PROMPT[:length], 24, f"{length}")
            texts[f"{length}"] = PROMPT[:length] + first.tokens
            num_drafted = len(speculator.drafted)
            found = driver.generate(PROMPT[:length], 24, f"{length}", generation=1)
            assert found.num_cached == (length - 1) // 4 * 4
            assert found.tokens == first.tokens
            assert len(speculator.drafted) > num_drafted
            start = PROMPT[:length] + first.tokens[:11]
            rest = driver.generate(start, 24, f"{length}", generation=2, resumed_tokens=11)
            assert rest.num_cached == (len(start) - 1) // 4 * 4
            assert first.tokens[:11] + rest.tokens == first.tokens
        driver.assert_all_blocks_are_back()
    assert_drafts_are_those_of(twin, speculator.drafted, 50)


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


@pytest.mark.parametrize("name", ["gemma3", "mistral-window", "llama4", "deepseek"])
def test_head_sees_no_token_before_the_last_bare_one(
    name: str, family_of: Callable[[str], TinyFamily], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences leave out and fill the layer in turns: cold, behind bare and plain hits, with NaN in free pages."""
    tiny, make_head = with_head(family_of(name))
    prompts = [[(5 * i * i + 3 * i + 7 * (i > 20) * length) % 90 + 3 for i in range(length)] for length in (9, 23, 40)]
    speculator = MixedSpeculator({}, share_bare=0.5)
    num_blocks = 40 * len(kv_groups(tiny.config).spans)
    sizes: dict[str, Any] = {"block_tokens": 4, "chunk_tokens": 16, "num_blocks": num_blocks, "max_num_seqs": 3}
    with Driver(tiny, speculator=speculator, make_head=make_head, **sizes) as driver:
        poison = Poison(monkeypatch)
        poison.blocks = driver.pool().fill_(float("nan"))
        hits: list[int] = []
        for turn in range(4):
            keys = [driver.submit(f"{turn}-{i}", prompt, 30) for i, prompt in enumerate(prompts)]
            for key, prompt in zip(keys, prompts, strict=True):
                assert tiny.is_greedy(prompt, driver.wait_end(key).tokens)
                hits.append(driver.heard[key].num_cached)
        driver.assert_all_blocks_are_back()
    assert_drafts_are_those_of(SlowTwin(tiny, make_head), speculator.drafted, 20)
    assert max(hits) >= 20
    assert {bool(each.num_bare) for each in speculator.drafted} == {True, False}


@pytest.mark.parametrize("is_bare", [True, False])
def test_bare_prompt_is_found_again_and_handed_off(
    headed: tuple[Tiny, MakeHead], twin: SlowTwin, is_bare: bool
) -> None:
    """A prefill engine leaves out what a decode engine does not use, and both find the blocks under other names."""
    tiny, make_head = headed
    prompt, speculator = PROMPT[:13], MixedSpeculator({}, share_bare=float(is_bare))
    sizes: dict[str, Any] = {**SIZES, "pin_sealed": True, "max_pinned": 64}
    with (
        Driver(tiny, make_head=make_head, **sizes) as source,
        Driver(tiny, make_head=make_head, speculator=speculator, **sizes) as target,
    ):
        found = [handed_off(source, target, prompt, NUM_TOKENS, name, temperature=0.0) for name in ("first", "second")]
        keys = [[each.block_key for each in driver.sealed] for driver in (source, target)]
        for driver in (source, target):
            driver.engine.unpin([each.block for each in driver.sealed])
    expected = tiny.greedy(prompt, NUM_TOKENS)
    assert [heard.tokens for heard in found] == [expected, expected]
    assert [heard.num_cached for heard in found] == [13, 13]
    assert [len(each) for each in keys] == [3, (13 + NUM_TOKENS - 1) // 4]
    assert {plain_key(key) != key for each in keys for key in each} == {is_bare}
    assert bool(speculator.drafted) != is_bare
    assert_drafts_are_those_of(twin, speculator.drafted, 0 if is_bare else 10)


@pytest.mark.parametrize("num_blocks", [12, 18])
def test_head_drafts_the_same_under_preemption(
    headed: tuple[Tiny, MakeHead], twin: SlowTwin, plain: Texts, num_blocks: int, preempted: list[Sequence]
) -> None:
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


@pytest.mark.parametrize("name", ["mistral-window", "gemma3", "llama4", "deepseek", "glm4-moe"])
def test_head_drafts_the_same_for_every_kind_of_layer(
    name: str, family_of: Callable[[str], TinyFamily], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows, chunks, experts and latent keys; cold and cached, with preemptions and NaN in all free pages."""
    tiny, make_head = with_head(family_of(name))
    prompts = [[(5 * i * i + 3 * i + 7 * (i > 20) * length) % 110 + 3 for i in range(length)] for length in (9, 23, 40)]
    speculator = MixedSpeculator({})
    num_blocks = 30 * len(kv_groups(tiny.config).spans)
    sizes: dict[str, Any] = {"block_tokens": 4, "chunk_tokens": 16, "num_blocks": num_blocks, "max_num_seqs": 3}
    with Driver(tiny, speculator=speculator, make_head=make_head, **sizes) as driver:
        poison = Poison(monkeypatch)
        poison.blocks = driver.pool().fill_(float("nan"))
        for turn in ("cold", "warm"):
            keys = [driver.submit(f"{turn}-{i}", prompt, 30) for i, prompt in enumerate(prompts)]
            for key, prompt in zip(keys, prompts, strict=True):
                assert tiny.is_greedy(prompt, driver.wait_end(key).tokens)
        driver.assert_all_blocks_are_back()
    assert_drafts_are_those_of(SlowTwin(tiny, make_head), speculator.drafted, 20)


@pytest.mark.parametrize("name", ["mistral-window", "llama4"])
def test_head_drafts_the_same_behind_a_hand_off_of_windows(name: str, family_of: Callable[[str], TinyFamily]) -> None:
    tiny, make_head = with_head(family_of(name))
    speculator = MixedSpeculator({})
    sizes: dict[str, Any] = {"block_tokens": 4, "chunk_tokens": 16}
    with (
        Driver(tiny, make_head=make_head, **sizes) as source,
        Driver(tiny, make_head=make_head, speculator=speculator, **sizes) as target,
    ):
        for length in (15, 16, 17, 24, 31):
            prompt = [(7 * i * i + length) % 110 + 3 for i in range(length)]
            heard = handed_off(source, target, prompt, 20, f"{length}")
            assert tiny.is_greedy(prompt, heard.tokens)
    assert_drafts_are_those_of(SlowTwin(tiny, make_head), speculator.drafted, 20)
