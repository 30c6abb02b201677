"""Custom tools: a function with one text for the model, a call with free text for the client."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import BadRequestError

from tests.services.gateway.conftest import END, MODEL_NAME, MakeBench
from tests.services.gateway.fakes import speaking
from tests.services.gateway.test_responses import ASKED, TOOL, client, events_of, prompt_of
from weft_services.gateway.dialects.openai_requests import parse_chat
from weft_services.gateway.text.custom_calls import CustomCalls
from weft_services.gateway.text.parts import Part, PartKind, joined

PATCH: Any = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
CHAT_PATCH: Any = {
    "type": "custom",
    "custom": {
        "name": "apply_patch",
        "description": "Edit files.",
        "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[a-z]+"}},
    },
}
TEXT = '*** Begin\n+say("hi")\n\\d {"input": "x"} ü 🙂'
WRITTEN = f'<tool_call>{{"name": "apply_patch", "arguments": {json.dumps({"input": TEXT})}}}</tool_call>'
NOW = '<tool_call>{"name": "now", "arguments": {"zone": "utc"}}</tool_call>'


def read(*texts: str, name: str = "apply_patch") -> list[tuple[PartKind, str]]:
    """A call whose arguments come in these pieces, as clients see it."""
    calls = CustomCalls(frozenset({"apply_patch"}))
    parts = calls.read([Part(PartKind.CALL, name, 0, "a")], False)
    for text in texts:
        parts += calls.read([Part(PartKind.ARGUMENTS, text)], False)
    return [(part.kind, part.text) for part in joined(parts + calls.read([], True))]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("is_ascii", [True, False])
def test_input_is_the_text_however_it_is_cut(size: int, is_ascii: bool) -> None:
    written = json.dumps({"input": TEXT}, ensure_ascii=is_ascii)
    pieces = [written[at : at + size] for at in range(0, len(written), size)]
    assert read(*pieces) == [(PartKind.CUSTOM, "apply_patch"), (PartKind.INPUT, TEXT)]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ('{ "input" :"a\nb\\/"}', "a\nb/"),  # raw control characters
        (r'{"input": "\d+\ud83d\ude00\ud800x"}', "\\d+\U0001f600\ufffdx"),
        ('{"input": "a", "more": 1}', "a"),
        ('{"more": 1, "input": "a"}', "a"),
        ('{"patch": "a"}', "a"),
        ('{"patch": 5}', '{"patch": 5}'),
        ('"just text"', "just text"),
        ("*** Begin", "*** Begin"),
        ("{}", ""),
        ("", ""),
        ('{"inp', ""),
        ('{"input": "cut o', "cut o"),
        ('{"input": "cut \\u00', "cut "),
    ],
)
def test_input_is_found_in_other_arguments(written: str, expected: str) -> None:
    inputs = [text for kind, text in read(written) if kind is PartKind.INPUT]
    assert inputs == ([expected] if expected else [])


def test_calls_of_functions_stay_calls_of_functions() -> None:
    expected = [(PartKind.CALL, "now"), (PartKind.ARGUMENTS, '{"input": "x"}')]
    assert read('{"input": ', '"x"}', name="now") == expected


async def test_custom_call_is_streamed_as_the_sdk_has_it(bench: MakeBench) -> None:
    async with bench(tool_format="hermes", context=4096) as b, client(b) as sdk:
        b.decode.script = speaking([*b.ids(WRITTEN + NOW), END])
        asked = {**ASKED, "tools": [TOOL, PATCH]}
        events = await events_of(sdk, **asked)
        kinds = list(dict.fromkeys(event.type for event in events))
        assert kinds[2:-1] == [
            "response.output_item.added",
            "response.custom_tool_call_input.delta",
            "response.custom_tool_call_input.done",
            "response.output_item.done",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
        ]
        added, done = (
            next(each for each in events if each.type == f"response.output_item.{end}") for end in ("added", "done")
        )
        assert (added.item.type, added.item.name, added.item.input) == ("custom_tool_call", "apply_patch", "")
        assert (done.item.input, done.item.call_id, done.item.id) == (TEXT, added.item.call_id, added.item.id)
        deltas = [each for each in events if each.type == "response.custom_tool_call_input.delta"]
        assert "".join(each.delta for each in deltas) == TEXT
        assert {(each.item_id, each.output_index) for each in deltas} == {(added.item.id, 0)}
        whole = await sdk.responses.create(**asked)
        for final in (whole, events[-1].response):
            custom, call = final.output
            assert (custom.type, custom.name, custom.input) == ("custom_tool_call", "apply_patch", TEXT)
            assert (call.type, call.name) == ("function_call", "now")
        assert [tool.type for tool in whole.tools] == ["function", "custom"]
        assert '"name": "apply_patch"' in prompt_of(b)
        assert "start: /.+/" in prompt_of(b), "the grammar is told in words"


async def test_custom_tool_in_a_namespace_is_called_by_both_names(bench: MakeBench) -> None:
    space: Any = {"type": "namespace", "name": "mcp", "description": "", "tools": [{"type": "custom", "name": "js"}]}
    async with bench(tool_format="hermes", context=4096) as b, client(b) as sdk:
        b.decode.script = speaking([*b.ids(WRITTEN.replace("apply_patch", "mcp__js")), END])
        answer = await sdk.responses.create(**ASKED, tools=[TOOL, space])
        (call,) = answer.output
        assert call.type == "custom_tool_call"
        assert (call.name, call.namespace, call.input) == ("js", "mcp", TEXT)
        result: Any = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "it is done"}
        again: Any = [{"role": "user", "content": "x"}, call.model_dump(exclude_none=True), result]
        await sdk.responses.create(**{**ASKED, "input": again}, tools=[space])
        assert prompt_of(b).count('"name": "mcp__js"') == 2, "declared, and called before"
        assert "<|im_start|>tool\nit is done<|im_end|>" in prompt_of(b)


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "custom", "name": "apply_patch"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "mcp"}, {"type": "custom", "name": "apply_patch"}],
        },
    ],
)
async def test_custom_tool_can_be_chosen(bench: MakeBench, choice: Any) -> None:
    async with bench(tool_format="hermes", context=4096) as b, client(b) as sdk:
        b.decode.script = speaking([*b.ids(WRITTEN), END])
        answer = await sdk.responses.create(**ASKED, tools=[TOOL, PATCH], tool_choice=choice)
        assert answer.output[0].type == "custom_tool_call"
        grammar = b.decode.started[0].sampling.grammar.text
        assert "apply_patch" in grammar
        assert '"now"' not in grammar


async def test_chat_has_custom_tools_too(bench: MakeBench) -> None:
    async with bench(tool_format="hermes", context=4096) as b, client(b) as sdk:
        b.decode.script = speaking([*b.ids(WRITTEN), END])
        messages: list[Any] = [{"role": "user", "content": "patch it"}]
        choice: Any = {"type": "custom", "custom": {"name": "apply_patch"}}
        asked: Any = {"model": MODEL_NAME, "tools": [CHAT_PATCH], "tool_choice": choice}
        answer: Any = (await sdk.chat.completions.create(**asked, messages=messages)).choices[0]
        assert answer.finish_reason == "tool_calls"
        (call,) = answer.message.tool_calls
        assert call.type == "custom"
        assert (call.custom.name, call.custom.input) == ("apply_patch", TEXT)
        assert "[a-z]+" in prompt_of(b)
        messages += [
            answer.message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "ok"},
        ]
        await sdk.chat.completions.create(model=MODEL_NAME, messages=messages)
        assert json.dumps({"input": TEXT}, ensure_ascii=False) in prompt_of(b)
        lines = (await b.http.post("/v1/chat/completions", json={**asked, "messages": messages, "stream": True})).text
        chunks = [json.loads(line[6:]) for line in lines.splitlines() if line.startswith("data: {")]
        deltas = [each for chunk in chunks for each in chunk["choices"][0]["delta"].get("tool_calls", ())]
        assert deltas[0] == {
            "index": 0,
            "id": deltas[0]["id"],
            "type": "custom",
            "custom": {"name": "apply_patch", "input": ""},
        }
        assert "".join(each["custom"]["input"] for each in deltas) == TEXT


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom"}]}, "tools.0"),
        ({"tools": [{"type": "custom", "custom": {"name": ""}}]}, "tools.0"),
        ({"tools": [CHAT_PATCH], "tool_choice": {"type": "custom", "custom": {"name": "other"}}}, "tool_choice"),
        ({"tools": [CHAT_PATCH], "tool_choice": {"type": "custom", "name": "apply_patch"}}, "tool_choice"),
    ],
)
async def test_wrong_custom_tool_is_named(bench: MakeBench, fields: Any, param: str) -> None:
    async with bench(tool_format="hermes") as b, client(b) as sdk:
        with pytest.raises(BadRequestError) as refused:
            await sdk.chat.completions.create(model=MODEL_NAME, messages=[{"role": "user", "content": "x"}], **fields)
        assert refused.value.param == param


def test_tokenize_shows_the_same_tools() -> None:
    from weft_services.gateway.dialects.token_requests import parse_tokenize

    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [CHAT_PATCH]}).encode()
    assert parse_tokenize(body).prompt.tools == parse_chat(body).prompts[0].tools  # type: ignore[union-attr]
