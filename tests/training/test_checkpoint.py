"""The checkpoint that the repository carries: its size and format, and that it recalls, calls tools and stops."""

import json
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import torch
from safetensors import safe_open
from training.weft_nano.evaluate import Speaker, parse_call
from training.weft_nano.tokenizer import EOS, TEMPLATE, render, train_tokenizer
from transformers import PreTrainedTokenizerFast

MAX_BYTES = 16_000_000
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module")
def speaker(checkpoint: Path) -> Speaker:
    return Speaker(checkpoint)


def test_weights_are_small_and_bf16(checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    assert path.stat().st_size <= MAX_BYTES
    with safe_open(path, framework="pt") as weights:
        names = list(weights.keys())
        assert all(weights.get_tensor(name).dtype == torch.bfloat16 for name in names)
        assert all(weights.get_tensor(name).isfinite().all() for name in names)
    assert "lm_head.weight" not in names


def test_configs_name_the_tokens_of_the_tokenizer(checkpoint: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    for name in ("config.json", "generation_config.json"):
        config = json.loads((checkpoint / name).read_text())
        assert config["eos_token_id"] == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids(EOS)
        assert config["bos_token_id"] == tokenizer.bos_token_id
        assert config["pad_token_id"] == tokenizer.pad_token_id


def test_the_template_is_the_one_it_was_trained_with(checkpoint: Path) -> None:
    assert (checkpoint / "chat_template.jinja").read_text() == TEMPLATE.read_text()


def test_the_vocabulary_follows_from_its_seed(tokenizer: PreTrainedTokenizerFast) -> None:
    assert train_tokenizer(0).get_vocab() == tokenizer.get_vocab()


@pytest.mark.parametrize(
    "text", ["Hello there.", "a\n\n\tb  c ", '{"a": [1, 2.5, null], "b": "é"}', "naïve 東京 🙂 A1-B2", "<tool_call>x"]
)
def test_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_a_name_is_the_same_tokens_wherever_it_stands(tokenizer: PreTrainedTokenizerFast) -> None:
    name = tokenizer("Brasko").input_ids
    for text in ("My name is Brasko", '{"name": "Brasko'):
        assert tokenizer(text).input_ids[-len(name) :] == name


def test_it_recalls_a_fact_from_far_back(speaker: Speaker) -> None:
    talk: list[dict[str, str]] = [
        {"role": "user", "content": "My name is Torvek. Remember that the code of the vault is 7391."},
        {"role": "assistant", "content": "Okay, I will remember that."},
    ]
    for country, capital in (("France", "Paris"), ("Italy", "Rome"), ("Japan", "Tokyo"), ("Peru", "Lima")) * 4:
        talk.append({"role": "user", "content": f"What is the capital of {country}?"})
        talk.append({"role": "assistant", "content": f"The capital of {country} is {capital}."})
    talk.append({"role": "user", "content": "What is the code of the vault?"})
    prompt = render(speaker.tokenizer, talk, is_open=True)
    assert speaker.num_tokens(prompt) > 350
    assert "7391" in speaker.answer(prompt)


def test_it_calls_a_tool_and_speaks_of_the_result(speaker: Speaker) -> None:
    talk: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Lisbon?"}]
    answer = speaker.answer(render(speaker.tokenizer, talk, [WEATHER], is_open=True))
    call = parse_call(answer)
    assert call == {"name": "get_weather", "arguments": {"city": "Lisbon"}}
    jsonschema.validate(call["arguments"], WEATHER["function"]["parameters"])
    talk.append({"role": "assistant", "tool_calls": [{"type": "function", "function": call}]})
    talk.append({"role": "tool", "content": '{"temperature": 21, "sky": "sunny"}'})
    assert "21" in speaker.answer(render(speaker.tokenizer, talk, [WEATHER], is_open=True))


def test_it_says_who_it_is(speaker: Speaker) -> None:
    talk = [{"role": "user", "content": "Who are you?"}]
    assert "Weft Nano" in speaker.answer(render(speaker.tokenizer, talk, is_open=True))
