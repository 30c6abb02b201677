"""What OpenAI's client is told of a prompt's own tokens is what transformers gives them, whatever is cached."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import Any

import openai
import pytest
import torch
from openai.types.completion_choice import Logprobs
from tokenizers import Tokenizer

from tests.mesh.conftest import MODEL, Mesh
from tests.mesh.oracle import TEXT, greedy, logprobs, prompts

pytestmark = pytest.mark.timeout(300)
# transformers in float32 is up to 4e-4 away from itself in float64 on these; tiny models have less of it, see
# tests/weft/engine/test_scoring.py
NOISE = 1e-3


@pytest.fixture
def client(mesh: Mesh) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def assert_told(told: Logprobs | None, tokens: list[int], num_top: int, tokenizer: Tokenizer, text: str) -> None:
    """`tokens` are all that was echoed and generated, `text` what they say."""
    assert told is not None
    assert told.tokens == [tokenizer.decode([token], skip_special_tokens=False) for token in tokens]
    assert told.token_logprobs is not None
    assert told.top_logprobs is not None
    assert told.text_offset is not None
    of_first: list[Any] = [told.token_logprobs[0], told.top_logprobs[0]]
    assert of_first == [None, None]
    expected = logprobs(tokens)[:-1]
    own = expected.gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
    assert told.token_logprobs[1:] == pytest.approx(own, abs=NOISE)
    for top, chances in zip(told.top_logprobs[1:], expected.topk(max(1, num_top)).values.tolist(), strict=True):
        if num_top:
            assert max(top.values()) == pytest.approx(chances[0], abs=NOISE)
            assert 1 <= len(top) <= num_top + 1
    for token, offset, after in zip(told.tokens, told.text_offset, [*told.text_offset[1:], len(text)], strict=True):
        assert text[offset:after] == token


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_a_batch_of_mixed_lengths_is_echoed_cold_and_warm(
    client: openai.OpenAI, tokenizer: Tokenizer, max_tokens: int
) -> None:
    asked = prompts(6, 1, 700, salt=40 + max_tokens)
    asked.append(asked[-1][:-1])
    for num_top in (0, 2):
        # what is cached changes nothing
        client.completions.create(model="weft-nano", prompt=asked[-2], max_tokens=1)
        answer = client.completions.create(
            model="weft-nano", prompt=asked, max_tokens=max_tokens, temperature=0, echo=True, logprobs=num_top
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == sum(map(len, asked))
        for prompt, choice in zip(asked, answer.choices, strict=True):
            assert choice.logprobs is not None
            assert choice.logprobs.tokens is not None
            said = greedy(prompt, max_tokens)[: len(choice.logprobs.tokens) - len(prompt)] if max_tokens else []
            has_stopped = choice.finish_reason == "stop"
            assert has_stopped or len(said) == max_tokens
            tokens = [*prompt, *said]
            spoken = tokenizer.decode(tokens[: len(tokens) - has_stopped], skip_special_tokens=False)
            assert choice.text == spoken
            whole = tokenizer.decode(tokens, skip_special_tokens=False)
            assert_told(choice.logprobs, tokens, num_top, tokenizer, whole)


def test_a_text_is_given_back_as_it_was_also_in_a_stream(client: openai.OpenAI, tokenizer: Tokenizer) -> None:
    text = "Grüße \N{GRINNING FACE} aus  Oslo<|im_end|>\n" + TEXT
    ids = tokenizer.encode(text).ids
    asked: dict[str, Any] = {"model": "weft-nano", "prompt": text, "max_tokens": 3, "temperature": 0}
    asked |= {"echo": True, "logprobs": 1}
    whole = client.completions.create(**asked)
    (choice,) = whole.choices
    assert choice.logprobs is not None
    assert choice.text.startswith(text)
    told = choice.logprobs.token_logprobs or []
    own = logprobs(ids)[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    assert told[1 : len(ids)] == pytest.approx(own, abs=NOISE)
    offsets = choice.logprobs.text_offset or []
    assert offsets == sorted(offsets)
    assert offsets[len(ids)] == len(text)
    lenient = client.copy(_extra_kwargs={"_strict_response_validation": False})
    chunks = lenient.completions.create(stream=True, **asked)
    pieces = [chunk.choices[0] for chunk in chunks]
    assert "".join(piece.text for piece in pieces) == choice.text
    streamed = [entry for piece in pieces if piece.logprobs for entry in piece.logprobs.token_logprobs or []]
    assert streamed[0] is None
    assert streamed[1:] == pytest.approx(told[1:], abs=NOISE)
    assert [at for piece in pieces if piece.logprobs for at in piece.logprobs.text_offset or []] == offsets


def test_an_echo_without_logprobs_is_the_prompt_and_its_answer(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "weft-nano", "max_tokens": 4, "temperature": 0, "n": 2}
    plain = client.completions.create(prompt=["The blue lamp", "Oslo is"], **asked)
    echoed = client.completions.create(prompt=["The blue lamp", "Oslo is"], echo=True, **asked)
    expected = ["The blue lamp"] * 2 + ["Oslo is"] * 2
    assert [each.text for each in echoed.choices] == [
        prompt + each.text for prompt, each in zip(expected, plain.choices, strict=True)
    ]


def assert_vllms(told: list[dict[str, Any] | None], ids: list[int], num_top: int) -> None:
    assert told[0] is None
    expected = logprobs(ids)[:-1]
    assert len(told) == len(ids)
    for token, entry, chances in zip(ids[1:], told[1:], expected, strict=True):
        assert entry is not None
        assert next(iter(entry)) == str(token)
        for name, each in entry.items():
            assert each["logprob"] == pytest.approx(float(chances[int(name)]), abs=NOISE)
            least, most = (int((chances > chances[int(name)] + slack).sum()) + 1 for slack in (NOISE, -NOISE))
            assert least <= each["rank"] <= most
        assert {each["rank"] for each in entry.values()} >= set(range(1, num_top + 1))


def test_prompt_logprobs_come_in_vllms_words(client: openai.OpenAI, mesh: Mesh) -> None:
    extra = {"prompt_logprobs": 3, "return_token_ids": True}
    answer = client.completions.create(
        model="weft-nano", prompt=[TEXT, "Oslo"], max_tokens=2, n=2, extra_body=extra, logprobs=1, echo=True
    ).to_dict()
    for choice in answer["choices"]:  # type: ignore[attr-defined]
        assert_vllms(choice["prompt_logprobs"], choice["prompt_token_ids"], 3)
        assert len(choice["logprobs"]["top_logprobs"][1]) <= 2
    user: Any = {"role": "user", "content": "Where is the blue lamp?"}
    chat = client.chat.completions.create(model="weft-nano", messages=[user], max_tokens=2, n=2, extra_body=extra)
    found: dict[str, Any] = chat.to_dict()
    assert_vllms(found["prompt_logprobs"], found["prompt_token_ids"], 3)


def test_the_best_of_several_are_those_with_the_best_mean(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "weft-nano", "prompt": [TEXT, "Oslo"], "max_tokens": 8, "temperature": 1.5}
    asked |= {"seed": 11, "logprobs": 0}
    every = client.completions.create(n=6, **asked)
    best = client.completions.create(n=2, best_of=6, **asked)

    def mean(choice: Any) -> float:
        return fmean(choice.logprobs.token_logprobs)

    for place in range(2):
        candidates = sorted(every.choices[6 * place : 6 * place + 6], key=mean, reverse=True)
        found = best.choices[2 * place : 2 * place + 2]
        assert [choice.text for choice in found] == [choice.text for choice in candidates[:2]]
        assert [mean(choice) for choice in found] == pytest.approx(list(map(mean, candidates[:2])), abs=NOISE)
    assert [choice.index for choice in best.choices] == [0, 1, 2, 3]
    assert best.usage is not None
    assert every.usage is not None
    assert best.usage.completion_tokens == every.usage.completion_tokens, "all that was generated counts"
    silent = client.completions.create(n=1, best_of=6, **{**asked, "logprobs": None})
    assert [choice.logprobs for choice in silent.choices] == [None, None]
    assert [choice.text for choice in silent.choices] == [best.choices[0].text, best.choices[2].text]
