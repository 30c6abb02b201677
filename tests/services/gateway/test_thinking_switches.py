"""Switches of thinking, wherever clients write them, and fields of other servers that change the answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import pytest
from openai import BadRequestError
from tokenizers import Tokenizer

from tests.services.gateway.conftest import END, MODEL_NAME, MakeBench, write_model
from tests.services.gateway.fakes import speaking
from weft.errors import InvalidRequest
from weft_services.gateway.dialects.anthropic_requests import parse_messages
from weft_services.gateway.dialects.body_checks import (
    CHAT_ALONE,
    EVERYWHERE,
    OPENAI_CHAT,
    OPENAI_COMPLETION,
    WRAPPERS,
)
from weft_services.gateway.dialects.openai_requests import parse_chat, parse_completion
from weft_services.gateway.dialects.responses_requests import parse_responses
from weft_services.gateway.dialects.token_requests import parse_tokenize
from weft_services.gateway.generation import Conversation

USER: Any = {"role": "user", "content": "hi"}
Parse = Callable[[bytes], Any]
BASES: dict[Parse, dict[str, Any]] = {
    parse_chat: {"messages": [USER]},
    parse_messages: {"messages": [USER], "max_tokens": 1},
    parse_responses: {"input": "hi"},
    parse_tokenize: {"messages": [USER]},
    parse_completion: {"prompt": "hi"},
}
CHATS = [parse_chat, parse_messages, parse_responses, parse_tokenize]
OFF = {"enable_thinking": False, "thinking": False}
ON = {"enable_thinking": True, "thinking": True}


def asked(parse: Parse, fields: dict[str, Any]) -> Any:
    return parse(json.dumps({"model": "m", **BASES[parse], **fields}).encode())


def variables(parse: Parse, fields: dict[str, Any]) -> dict[str, Any]:
    found = asked(parse, fields)
    prompt = found.prompt if parse is parse_tokenize else found.prompts[0]
    assert isinstance(prompt, Conversation)
    return prompt.kwargs


def refusal(parse: Parse, fields: dict[str, Any]) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refused:
        asked(parse, fields)
    return refused.value


@pytest.mark.parametrize("name", ["enable_thinking", "think"])
@pytest.mark.parametrize("parse", CHATS)
def test_top_level_switch_reaches_the_template(parse: Parse, name: str) -> None:
    assert variables(parse, {name: False}) == OFF
    assert variables(parse, {name: True}) == ON
    assert variables(parse, {name: None}) == {}
    assert refusal(parse, {name: "low"}).param == name


@pytest.mark.parametrize("parse", CHATS)
def test_template_kwargs_win_over_other_switches(parse: Parse) -> None:
    for kwargs in ({"enable_thinking": True}, {"thinking": True}):
        more = {"chat_template_kwargs": kwargs, "enable_thinking": False, "think": False}
        assert variables(parse, more) == kwargs
    both = {"chat_template_kwargs": {"style": "brief"}, "enable_thinking": False}
    assert variables(parse, both) == {**OFF, "style": "brief"}
    assert variables(parse, {"enable_thinking": True, "think": False}) == ON


@pytest.mark.parametrize("parse", [parse_chat, parse_messages, parse_tokenize])
@pytest.mark.parametrize(("kind", "expected"), [("disabled", OFF), ("enabled", ON), ("adaptive", ON)])
def test_thinking_of_a_type_is_a_switch(parse: Parse, kind: str, expected: dict[str, Any]) -> None:
    assert variables(parse, {"thinking": {"type": kind}}) == expected
    assert variables(parse, {"thinking": {"type": kind}, "enable_thinking": False}) == OFF
    assert refusal(parse, {"thinking": {"type": "deep"}}).param == "thinking.type"


@pytest.mark.parametrize("parse", [parse_chat, parse_responses, parse_tokenize])
def test_reasoning_is_a_switch_and_an_effort(parse: Parse) -> None:
    assert variables(parse, {"reasoning": {"enabled": False}}) == OFF
    assert variables(parse, {"reasoning": {"enabled": True, "effort": "high"}}) == {**ON, "reasoning_effort": "high"}
    assert variables(parse, {"reasoning": {"effort": "low", "summary": "auto"}}) == {"reasoning_effort": "low"}
    assert variables(parse, {"reasoning": {"effort": "none"}}) == {**OFF, "reasoning_effort": "none"}
    assert variables(parse, {"reasoning": {"exclude": False, "max_tokens": None}}) == {}
    for wrong in ({"max_tokens": 100}, {"exclude": True}, {"enabled": "no"}, {"effort": 5}):
        assert refusal(parse, {"reasoning": wrong}).param == f"reasoning.{next(iter(wrong))}"


def test_effort_none_switches_thoughts_off() -> None:
    expected = {**OFF, "reasoning_effort": "none"}
    assert variables(parse_chat, {"reasoning_effort": "none"}) == expected
    assert variables(parse_messages, {"output_config": {"effort": "none"}}) == expected
    assert variables(parse_chat, {"reasoning_effort": "none", "enable_thinking": True})["enable_thinking"] is True
    assert variables(parse_chat, {"reasoning_effort": "low"}) == {"reasoning_effort": "low"}


def test_budget_of_thoughts_is_refused_in_chats_alone() -> None:
    budget = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    assert refusal(parse_chat, budget).param == "thinking.budget_tokens"
    assert variables(parse_messages, budget) == ON


@pytest.mark.parametrize(
    ("parse", "fields", "says"),
    [
        (parse_chat, {"thinking_budget": 0}, "use enable_thinking"),
        (parse_chat, {"include_reasoning": False}, "not supported"),
        (parse_chat, {"chat_template_args": {"enable_thinking": False}}, "use chat_template_kwargs"),
        (parse_chat, {"extra_body": {"enable_thinking": False}}, "at the top of the body"),
        (parse_chat, {"options": {"num_ctx": 4096}}, "at the top of the body"),
        (parse_chat, {"num_predict": 5}, "use max_tokens"),
        (parse_chat, {"max_output_tokens": 5}, "use max_tokens"),
        (parse_chat, {"repeat_penalty": 1.1}, "use repetition_penalty"),
        (parse_chat, {"format": "json"}, "use response_format"),
        (parse_chat, {"system": "Be brief."}, "use a message of role system"),
        (parse_chat, {"stop_sequences": ["x"]}, "use stop"),
        (parse_chat, {"mirostat": 2}, "mirostat is not supported here"),
        (parse_chat, {"transforms": ["middle-out"]}, "not supported"),
        (parse_chat, {"random_seed": 1}, "use seed"),
        (parse_completion, {"tools": [{}]}, "use /v1/chat/completions"),
        (parse_completion, {"enable_thinking": False}, "use /v1/chat/completions"),
        (parse_completion, {"max_completion_tokens": 5}, "use max_tokens"),
        (parse_completion, {"n_predict": 5}, "use max_tokens"),
        (parse_messages, {"stop": ["x"]}, "use stop_sequences"),
        (parse_messages, {"reasoning": {"enabled": False}}, "use thinking"),
        (parse_messages, {"reasoning_effort": "low"}, "use output_config.effort"),
        (parse_messages, {"format": "json"}, "use output_config.format"),
        (parse_messages, {"instructions": "Be brief."}, "use system"),
        (parse_messages, {"options": {"top_k": 1}}, "at the top of the body"),
        (parse_responses, {"max_tokens": 5}, "use max_output_tokens"),
        (parse_responses, {"num_predict": 5}, "use max_output_tokens"),
        (parse_responses, {"reasoning_effort": "none"}, "use reasoning.effort"),
        (parse_responses, {"thinking": {"type": "disabled"}}, "use reasoning.effort"),
        (parse_responses, {"response_format": {"type": "json_object"}}, "use text.format"),
        (parse_responses, {"system": "Be brief."}, "use instructions"),
    ],
)
def test_refusal_names_the_right_place(parse: Parse, fields: dict[str, Any], says: str) -> None:
    refused = refusal(parse, fields)
    assert (refused.param, refused.reason) == (next(iter(fields)), "unsupported_parameter")
    assert says in str(refused)


@pytest.mark.parametrize(
    ("parse", "table"),
    [
        (parse_chat, OPENAI_CHAT),
        (parse_completion, OPENAI_COMPLETION),
        (parse_messages, EVERYWHERE),
        (parse_responses, CHAT_ALONE),
    ],
)
def test_fields_without_effect_are_let_through(parse: Parse, table: dict[str, tuple[Any, ...]]) -> None:
    for name, values in table.items():
        for value in (*values, None):
            asked(parse, {name: value})


@pytest.mark.parametrize("parse", [parse_chat, parse_completion, parse_messages, parse_responses])
def test_what_changes_no_answer_is_let_through(parse: Parse) -> None:
    harmless = {
        "num_ctx": 4096,
        "keep_alive": "5m",
        "provider": {"order": ["x"]},
        "models": ["x"],
        "route": "fallback",
        "cache_prompt": True,
        "id_slot": 0,
        "usage": {"include": True},
        "mirostat_tau": 5.0,
        "store": False,
        "service_tier": "auto",
        "drop_params": True,
    }
    asked(parse, harmless)


def test_wrappers_are_refused_everywhere() -> None:
    for parse in (parse_chat, parse_completion, parse_messages, parse_responses):
        for name in WRAPPERS:
            assert "top of the body" in str(refusal(parse, {name: {"top_k": 1}}))


async def test_sdks_switch_thoughts_off(bench: MakeBench, tokenizer: Tokenizer, tmp_path: Path) -> None:
    template = "{{ messages[0].content }} {{ enable_thinking is defined and enable_thinking }}"
    model = str(write_model(tmp_path, tokenizer, template))
    async with bench(model=model) as b:
        b.decode.script = speaking([*b.ids("hello"), END])
        chats, answers = b.client.chat.completions, b.client.responses
        for switch in (True, False):
            extra = {"enable_thinking": switch}
            await chats.create(model=MODEL_NAME, messages=[USER], extra_body=extra)
            await answers.create(model=MODEL_NAME, input="hi", extra_body=extra)
            async with anthropic.AsyncAnthropic(base_url=b.url, api_key="none", max_retries=0) as sdk:
                await sdk.messages.create(model=MODEL_NAME, messages=[USER], max_tokens=5, extra_body=extra)
        told = [b.tokenizer.decode(list(start.token_ids)).split()[1] for start in b.decode.started]
        assert told == ["True"] * 3 + ["False"] * 3
        with pytest.raises(BadRequestError, match=r"thinking_budget is not supported here; use enable_thinking"):
            await chats.create(model=MODEL_NAME, messages=[USER], extra_body={"thinking_budget": 0})
