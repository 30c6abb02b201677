"""The one validator: accepted and rejected fields, and the field that each error names."""

from __future__ import annotations

import json
from typing import Any

import pytest

from weft.errors import InvalidRequest
from weft_services.gateway.dialects.openai_requests import parse_chat, parse_completion
from weft_services.gateway.generation import Conversation, Generation

USER = {"role": "user", "content": "hi"}


def chat(**fields: Any) -> Generation:
    return parse_chat(json.dumps({"model": "m", "messages": [USER], **fields}).encode())


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def tags(triggers: list[str]) -> dict[str, Any]:
    return {"type": "structural_tag", "structures": [{"begin": "<f=a>"}], "triggers": triggers}


def completion(**fields: Any) -> Generation:
    return parse_completion(json.dumps({"model": "m", "prompt": "hi", **fields}).encode())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [USER, {"role": "user", "content": 7}]}, "messages.1.content"),
        ({"messages": [{"role": "user"}]}, "messages.0"),
        ({"messages": [{"role": "system", "content": None}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages.0.content"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "messages.0.tool_calls.0"),
        ({"moderation": {"model": "omni-moderation-latest"}}, "moderation"),
        ({"model": 3}, "model"),
        ({"model": ""}, "model"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"seed": "x"}, "seed"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ["a", ""]}, "stop.1"),
        ({"stop": ["a" * 257]}, "stop.0"),
        ({"stop": 5}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": 3}}, "stream_options.include_usage"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"tools": [{"type": "retrieval"}]}, "tools.0"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools.0"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"1": 10**400}}, "logit_bias"),
        ({"logit_bias": {"1": float("nan")}}, "logit_bias"),
        ({"logit_bias": {"one": 5}}, "logit_bias"),
        ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias"),
        ({"logit_bias": {"1": True}}, "logit_bias"),
        ({"logit_bias": {str(token): 1 for token in range(1025)}}, "logit_bias"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"chat_template_kwargs": {"messages": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": [1]}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": schema_format("x")}, "response_format.json_schema.schema"),
        ({"response_format": schema_format(nested(40))}, "response_format.json_schema.schema"),
        ({"response_format": schema_format({"description": "x" * 70_000})}, "response_format.json_schema.schema"),
        ({"response_format": schema_format({"multipleOf": 99731})}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "structural_tag", "structures": []}}, "response_format"),
        ({"response_format": tags(["<f"] * 65)}, "response_format"),
        ({"response_format": tags(["<f", ""])}, "response_format.triggers.1"),
        ({"response_format": tags(["x" * 5000, "<f"])}, "response_format.triggers.0"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_regex": "a" * 5000}, "guided_regex"),
        ({"guided_regex": ["a"]}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice"),
        ({"guided_grammar": "a: b\n" * 100}, "guided_grammar"),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 2}, "min_tokens"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"echo": True}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"add_special_tokens": True}, "add_special_tokens"),
        ({"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ],
)
def test_a_bad_chat_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        chat(**fields)
    assert refusal.value.param == param
    assert param.split(".")[0] in str(refusal.value)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [[1], [2.5]]}, "prompt"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": "a", "add_special_tokens": False}, "add_special_tokens"),
        ({"prompt": ["a"] * 64, "n": 3}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"prompt": ["a"] * 64, "best_of": 3}, "best_of"),
        ({"best_of": 21}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs"),
        ({"cache_salt": "mine"}, "cache_salt"),
    ],
)
def test_a_bad_completion_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        completion(**fields)
    assert refusal.value.param == param


@pytest.mark.parametrize("body", [b"", b"{", b"nonsense", b'{"model": "\xff"}', b"[" * 100_000, b'"text"', b"[]"])
def test_what_is_not_a_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_chat(body)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        parse_chat(json.dumps({"model": "m"}).encode())
    assert refusal.value.param == "messages"


def test_fields_that_change_nothing_are_let_through() -> None:
    asked = chat(
        presence_penalty=0.0,
        frequency_penalty=0,
        repetition_penalty=None,
        logit_bias={},
        chat_template_kwargs={},
        response_format={"type": "text"},
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        best_of=1,
        something_new=[1],
        temperature=None,
        stop=None,
        n=None,
        stream_options=None,
    )
    assert asked == chat()


def test_what_vllm_clients_send_is_understood() -> None:
    asked = completion(
        prompt=[[1, 2], [3]],
        ignore_eos=True,
        return_token_ids=True,
        top_k=-1,
        min_p=0.1,
        stop_token_ids=[5],
        seed=-1,
        stop="x",
        logprobs=0,
        temperature=1,
    )
    assert asked.prompts == ((1, 2), (3,))
    assert (asked.top_k, asked.min_p, asked.stop_token_ids, asked.stop) == (0, 0.1, (5,), ("x",))
    assert asked.seed is None
    assert completion(prompt="x", seed=-2).seed == 2**64 - 2
    assert asked.num_logprobs == 0
    assert asked.ignore_eos
    assert asked.return_token_ids


def test_the_newer_name_of_max_tokens_wins_and_is_remembered() -> None:
    asked = chat(max_tokens=5, max_completion_tokens=7)
    assert (asked.max_tokens, asked.max_tokens_field) == (7, "max_completion_tokens")


def test_text_parts_become_one_text_and_tool_arguments_become_objects() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": null}'}}
    broken = {"id": "2", "type": "function", "function": {"name": "f", "arguments": '{"x": '}}
    asked = chat(
        messages=[
            {"role": "developer", "content": parts},
            {"role": "assistant", "content": None, "tool_calls": [call, broken]},
            {"role": "tool", "content": "ok", "tool_call_id": "1"},
        ]
    )
    (conversation,) = asked.prompts
    assert isinstance(conversation, Conversation)
    assert conversation.messages[0] == {"role": "developer", "content": "ab"}
    calls = conversation.messages[1]["tool_calls"]
    assert calls[0]["function"]["arguments"] == {"x": None}
    assert calls[1]["function"]["arguments"] == '{"x": '


def test_tools_are_left_out_when_the_client_wants_no_call() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    with_tools, without = chat(tools=tools).prompts[0], chat(tools=tools, tool_choice="none").prompts[0]
    assert isinstance(with_tools, Conversation)
    assert isinstance(without, Conversation)
    assert with_tools.tools == tuple(tools)
    assert without.tools == ()


def test_the_session_is_the_first_usable_hint() -> None:
    assert chat(prompt_cache_key="k", session_id="s", user="u").session == "k"
    assert chat(prompt_cache_key="", session_id="s" * 257, user="u").session == "u"
    assert chat(user=7).session == ""


def test_numbers_without_a_fraction_are_integers_and_the_least_top_p_keeps_the_likeliest() -> None:
    asked = chat(max_tokens=7.0, n=2.0, seed=-4.0, top_p=0)
    assert (asked.max_tokens, asked.n, asked.seed) == (7, 2, 2**64 - 4)
    assert asked.top_p is not None
    assert 0 < asked.top_p < 1e-5


def test_what_an_assistant_once_refused_is_text() -> None:
    said = [{"type": "text", "text": "No. "}, {"type": "refusal", "refusal": "Never."}]
    (conversation,) = chat(messages=[{"role": "assistant", "content": said}]).prompts
    assert isinstance(conversation, Conversation)
    assert conversation.messages[0]["content"] == "No. Never."


def test_thoughts_are_read_under_either_name() -> None:
    for given in ({"reasoning": "hm"}, {"reasoning_content": "hm"}, {"reasoning_content": "hm", "reasoning": "no"}):
        (prompt,) = chat(messages=[USER, {"role": "assistant", "content": "x", **given}, USER]).prompts
        assert isinstance(prompt, Conversation)
        assert prompt.messages[1] == {"role": "assistant", "content": "x", "reasoning_content": "hm"}
