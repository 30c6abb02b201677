"""Functions that name no parameters: a call of one can be nothing but a call without arguments."""

from __future__ import annotations

from typing import Any

import pytest

from tests.services.gateway.conftest import MODEL_NAME, MakeBench
from weft_services.gateway.text.tool_formats import FORMATS

USER: Any = {"role": "user", "content": "hi"}
EMPTY = {"type": "object", "properties": {}}
NOTHING: dict[str, dict[str, Any]] = {
    "left out": {},
    "null": {"parameters": None},
    "an empty schema": {"parameters": {}},
    "any object": {"parameters": {"type": "object"}},
    "no properties": {"parameters": EMPTY},
    "none required": {"parameters": {**EMPTY, "required": [], "title": "now", "minProperties": 0}},
    "no others": {"parameters": {**EMPTY, "additionalProperties": False}},
    "none, strictly": {"parameters": {**EMPTY, "required": [], "additionalProperties": False}, "strict": True},
    "left out, strictly": {"strict": True},
    "a class without fields": {"parameters": {"$ref": "#/$defs/Now", "$defs": {"Now": {**EMPTY, "title": "Now"}}}},
    "unset keywords": {"parameters": {"type": "object", "properties": None, "required": None}},
    "with a schema's name": {"parameters": {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object"}},
}
SOMETHING: dict[str, dict[str, Any]] = {
    "a property": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "others": {"type": "object", "additionalProperties": True},
    "others by a schema": {"type": "object", "additionalProperties": {}},
    "by patterns": {"type": "object", "patternProperties": {"^a$": {}}},
    "one of several": {"anyOf": [{"properties": {"a": {"type": "integer"}}}, {"properties": {"b": {}}}]},
    "required ones": {"type": "object", "required": ["a"]},
    "some": {"type": "object", "minProperties": 1},
}
# family, all before the arguments, an argument, all after them
WRITTEN = {
    "hermes": ('<tool_call>{"name": "now", "arguments": ', '{"a": 1}', "}</tool_call>"),
    "llama": ('{"name": "now", "parameters": ', '{"a": 1}', "}"),
    "mistral": ('[TOOL_CALLS][{"name": "now", "arguments": ', '{"a": 1}', "}]"),
    "mistral-args": ("[TOOL_CALLS]now[ARGS]", '{"a": 1}', ""),
    "deepseek-v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n",
        '{"a": 1}',
        "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek-v3.1": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>",
        '{"a": 1}',
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "kimi": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>",
        '{"a": 1}',
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "nemotron-v2": ('<TOOLCALL>[{"name": "now", "arguments": ', '{"a": 1}', "}]</TOOLCALL>"),
    "command-r": (
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "now", "parameters": ',
        '{"a": 1}',
        "}\n]<|END_ACTION|>",
    ),
    "functionary": ("<function=now>", '{"a": 1}', "</function>"),
    "glm": (
        "<tool_call>now\n",
        "<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n",
        "</tool_call>",
    ),
    "seed": (
        "<seed:tool_call>\n<function=now>\n",
        "<parameter=a>1</parameter>\n",
        "</function>\n</seed:tool_call>",
    ),
    "hy3": (
        "<tool_calls>\n<tool_call>now<tool_sep>\n",
        "<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n",
        "</tool_call>\n</tool_calls>",
    ),
    "minimax-m2": (
        '<minimax:tool_call>\n<invoke name="now">\n',
        '<parameter name="a">1</parameter>\n',
        "</invoke>\n</minimax:tool_call>",
    ),
    "qwen-xml": ("<tool_call>\n<function=now>\n", "<parameter=a>\n1\n</parameter>\n", "</function>\n</tool_call>"),
}


def tool(**more: Any) -> Any:
    return {"type": "function", "function": {"name": "now", **more}}


async def ask(b: Any, **fields: Any) -> None:
    body = {"model": MODEL_NAME, "messages": [USER], "tool_choice": "required", **fields}
    answer = await b.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("family", WRITTEN)
async def test_call_has_no_arguments_in_any_format(bench: MakeBench, family: str) -> None:
    before, argument, after = WRITTEN[family]
    nothing = "{}" if FORMATS[family].tags is None else ""
    async with bench(context=2048, tool_format=family) as b:
        for more in NOTHING.values():
            await ask(b, tools=[tool(**more)])
            assert b.allows(before + nothing + after), more
            assert not b.allows(before + argument + after), more
            assert not b.allows(before + nothing.replace("{", "{ ") + "  " + after), more


@pytest.mark.parametrize("parameters", SOMETHING.values(), ids=SOMETHING)
async def test_call_has_arguments_when_the_schema_lets_it(bench: MakeBench, parameters: dict[str, Any]) -> None:
    before, argument, after = WRITTEN["hermes"]
    async with bench(tool_format="hermes") as b:
        for is_strict in (False, True):
            await ask(b, tools=[tool(parameters=parameters, strict=is_strict)])
            assert b.allows(before + argument + after)


async def test_only_the_function_without_parameters_has_none(bench: MakeBench) -> None:
    before, argument, after = WRITTEN["hermes"]
    later = tool(parameters=SOMETHING["a property"])
    later["function"]["name"] = "later"
    named = {"type": "function", "function": {"name": "now"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    async with bench(context=2048, tool_format="hermes") as b:
        for choice in ("required", named, allowed):
            await ask(b, tools=[later, tool()], tool_choice=choice)
            assert b.allows(f"{before}{{}}{after}")
            assert not b.allows(before + argument + after)
            is_callable = choice == "required"
            assert b.allows(before.replace("now", "later") + argument + after) == is_callable


BY_RESPONSES = ("/v1/responses", {"input": "hi"}, ("required", {"type": "function", "name": "now"}))
BY_MESSAGES = (
    "/v1/messages",
    {"messages": [USER], "max_tokens": 9},
    ({"type": "any"}, {"type": "tool", "name": "now"}),
)


@pytest.mark.parametrize(
    ("api", "tool"),
    [
        *((BY_RESPONSES, {"type": "function", **more}) for more in ({}, {"parameters": None}, {"parameters": EMPTY})),
        *((BY_MESSAGES, {"input_schema": schema}) for schema in ({}, {"type": "object"}, EMPTY)),
    ],
    ids=str,
)
async def test_call_has_no_arguments_by_any_api(bench: MakeBench, api: Any, tool: dict[str, Any]) -> None:
    (before, argument, after), (path, fields, choices) = WRITTEN["hermes"], api
    async with bench(tool_format="hermes") as b:
        for choice in choices:
            body = {"model": MODEL_NAME, **fields, "tools": [{"name": "now", **tool}], "tool_choice": choice}
            assert (await b.http.post(path, json=body)).status_code == 200
            assert b.allows(f"{before}{{}}{after}")
            assert not b.allows(before + argument + after)
