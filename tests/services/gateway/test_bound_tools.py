"""Strict tools where the choice is free: what binds the calls, family by family, and what stays free."""

from __future__ import annotations

from typing import Any

import pytest

from tests.services.gateway.conftest import MODEL_NAME, MakeBench
from tests.services.gateway.test_tag_calls import RECURSIVE

USER: Any = {"role": "user", "content": "hi"}
NODE = {
    "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "size": {"$ref": "#/properties/width"}},
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "mode": {"type": ["string", "null"], "enum": ["r", "w", None]},
        "width": {"type": "integer"},
        "height": {"$ref": "#/properties/width"},
        "node": {"type": "object", "properties": {"under": {"$ref": "#/$defs/node"}}},
        "other": {"$ref": "#"},
        "kind": {"const": "fast"},
        "version": {"const": 2},
        "pace": {"anyOf": [{"type": "string", "enum": ["slow", "fast"]}, {"const": "full"}, {"type": "null"}]},
    },
    "required": [],
    "$defs": {"node": {"type": "object", "properties": {"height": {"$ref": "#/properties/height"}}}},
}
GO: Any = {"type": "function", "function": {"name": "go-there", "parameters": SCHEMA, "strict": True}}
STEP: Any = {"type": "function", "function": {"name": "step", "parameters": RECURSIVE, "strict": True}}
NOW: Any = {"type": "function", "function": {"name": "now"}}
CALL = '{"name": "go-there", "parameters": {"width": '
XML = "<tool_call>\n<function=go-there>\n"
END_XML = "</function>\n</tool_call>"
XML_STEP = "<tool_call>\n<function=step>\n<parameter=size>\n"
WAY = "\n</parameter>\n<parameter=way>\n"

# family, what a model begins to write, whether it may
WRITTEN = [
    ("llama", "", True),
    ("llama", "It is {noon}.", True),
    ("llama", "[1, 2, now(3)]", True),
    ("llama", f"{CALL}3}}}}", True),
    ("llama", f'{CALL}3}}}}; {{"name": "now", "parameters": {{}}}}', True),
    ("llama", f'{CALL}"', False),
    ("llama", f'\n {CALL}"', False),
    ("llama", "[go-there(", False),
    ("llama", "\n[now(", False),
    ("llama", '{"na":', False),
    ("qwen-xml", f"Hm. {XML}<parameter=mode>\nnull\n</parameter>\n{END_XML}", True),
    ("qwen-xml", f"{XML}<parameter=mode>\nx", False),
    ("qwen-xml", f"{XML}<parameter=kind>\nfast\n</parameter>\n<parameter=version>\n2\n</parameter>\n{END_XML}", True),
    ("qwen-xml", f"{XML}<parameter=kind>\nslow", False),
    ("qwen-xml", f"{XML}<parameter=version>\n3", False),
    ("qwen-xml", f"{XML}<parameter=pace>\nslow\n</parameter>\n{END_XML}", True),
    ("qwen-xml", f"{XML}<parameter=pace>\nfull\n</parameter>\n{END_XML}", True),
    ("qwen-xml", f"{XML}<parameter=pace>\nnull\n</parameter>\n{END_XML}", True),
    ("qwen-xml", f"{XML}<parameter=pace>\nx", False),
    ("qwen-xml", f"{XML}<parameter=height>\n7\n</parameter>\n{END_XML}", True),
    ("qwen-xml", f'{XML}<parameter=height>\n"', False),
    ("qwen-xml", f'{XML}<parameter=node>\n{{"under": {{"height": 7}}}}\n</parameter>\n{END_XML}', True),
    ("qwen-xml", f'{XML}<parameter=node>\n{{"under": {{"height": "', False),
    ("qwen-xml", f'{XML}<parameter=other>\n{{"other": {{"width": 7}}}}\n</parameter>\n{END_XML}', True),
    ("qwen-xml", f'{XML}<parameter=other>\n{{"other": {{"width": "', False),
    ("qwen-xml", f"{XML_STEP}7{WAY}1\n</parameter>\n{END_XML}", True),
    ("qwen-xml", "<tool_call>\n<function=step>\n</function>", False),
    ("qwen-xml", f"{XML_STEP}7{WAY}2", False),
    ("qwen-xml", f'{XML_STEP}7\n</parameter>\n<parameter=next>\n{{"size": "', False),
    ("glm", "Hm. <tool_call>step\n<arg_key>size</arg_key>\n<arg_value>7</arg_value>\n</tool_call>", True),
    ("glm", "<tool_call>step<arg_key>size</arg_key><arg_value>7</arg_value></tool_call>", True),
    ("glm", '<tool_call>step\n<arg_key>size</arg_key>\n<arg_value>"', False),
    ("glm", "<tool_call>go-there\n<arg_key>mode</arg_key>\n<arg_value>x", False),
    ("seed", "<seed:tool_call>\n<function=step>\n<parameter=size>7</parameter>\n</function>\n</seed:tool_call>", True),
    ("seed", '<seed:tool_call>\n<function=step>\n<parameter=size>"', False),
    (
        "hy3",
        "<tool_calls><tool_call>step<tool_sep><arg_key>size</arg_key><arg_value>7</arg_value></tool_call></tool_calls>",
        True,
    ),
    ("hy3", "<tool_calls><tool_call>step<tool_sep></tool_call>", False),
    (
        "minimax-m2",
        '<minimax:tool_call>\n<invoke name="step">\n<parameter name="size">7</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
        True,
    ),
    ("minimax-m2", '<minimax:tool_call>\n<invoke name="later">', False),
    ("minicpm5", '<function name="step"><param name="size">7</param></function>', True),
    ("minicpm5", '<function name="step"><param name="size">"', False),
    ("apriel", '<tool_calls>[{"name": "now", "arguments": {}}]</tool_calls>', True),
    ("apriel", '<tool_calls>[{"name": "later', False),
    ("granite-3", 'So: <|tool_call|>[{"name": "now", "arguments": {}}]', True),
    ("granite-3", '<|tool_call|>[{"name": "step", "arguments": {"size": "', False),
    ("apertus", '<|tools_prefix|>[{"now": {}}, {"now": {}}]<|tools_suffix|>', True),
    ("apertus", '<|tools_prefix|>[{"later', False),
    ("solar", "<|tool_calls|><|tool_call:begin|>call1<|tool_call:name|>now<|tool_call:args|>{}<|tool_call:end|>", True),
    ("solar", "<|tool_calls|><|tool_call:begin|>call1<|tool_call:name|>later", False),
    ("gigachat-3", '<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "now", "arguments": {}}', True),
    # markers that are no tokens here: text may go up to them and no further
    ("deepseek-v3.1", "<｜tool▁calls", True),
    ("deepseek-v3.1", "a <｜tool▁calls▁begin｜>b", False),
    ("kimi", "<|tool_calls_section_begin|>b", False),
    ("mistral-args", "So: [TOOL_CALLS]now[ARGS]{}", True),
    ("mistral-args", "So: [TOOL_CALLS]later", False),
]


@pytest.mark.parametrize(("family", "text", "is_kept"), WRITTEN)
async def test_calls_are_bound_and_text_is_not(bench: MakeBench, family: str, text: str, is_kept: bool) -> None:
    async with bench(context=2048, tool_format=family) as b:
        await b.client.chat.completions.create(model=MODEL_NAME, messages=[USER], tools=[GO, STEP, NOW])
        assert b.allows(text, is_whole=is_kept) == is_kept


OPTIONAL = {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]}


@pytest.mark.parametrize("own", [{"pattern": "^[0-9]+$"}, {"type": "string", "minLength": 2}, OPTIONAL])
async def test_what_a_strict_tool_asks_of_a_free_text_is_refused(bench: MakeBench, own: dict[str, Any]) -> None:
    async with bench(tool_format="qwen-xml") as b:
        function = {"name": "f", "parameters": {"type": "object", "properties": {"when": own}}}
        for is_strict in (True, False):
            tools = [{"type": "function", "function": {**function, "strict": is_strict}}]
            body = {"model": MODEL_NAME, "messages": [USER], "tools": tools, "tool_choice": "required"}
            answer = await b.http.post("/v1/chat/completions", json=body)
            if not is_strict:
                assert answer.status_code == 200
                continue
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools.0.function.parameters")
            assert answer.json()["error"]["message"].startswith("tools.0.function.parameters.properties.when.")


@pytest.mark.parametrize("own", [{"format": "path"}, {"minLength": 0}, {"type": "string", "pattern": None}], ids=str)
async def test_free_text_may_be_annotated(bench: MakeBench, own: dict[str, Any]) -> None:
    async with bench(tool_format="qwen-xml") as b:
        function = {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {"when": own}}}
        body = {"model": MODEL_NAME, "messages": [USER], "tools": [{"type": "function", "function": function}]}
        assert (await b.http.post("/v1/chat/completions", json=body)).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [GO]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({}, None),
    ],
)
@pytest.mark.parametrize("family", ["deepseek-v3.2", "deepseek-v4", "gemma4", "lfm2", "olmo3", "pythonic"])
async def test_format_that_no_grammar_has_is_enforced_by_none(
    bench: MakeBench, family: str, fields: dict[str, Any], param: str | None
) -> None:
    async with bench(context=2048, tool_format=family) as b:
        body = {"model": MODEL_NAME, "messages": [USER], "tools": [NOW], **fields}
        answer = await b.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == (200 if param is None else 400), answer.text
        assert param is None or answer.json()["error"]["param"] == param
