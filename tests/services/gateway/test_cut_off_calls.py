"""Answers that are cut off by their length: nothing of a call's markup becomes text, and all text before it does."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.services.gateway.conftest import END, MODEL_NAME, Bench, MakeBench
from tests.services.gateway.fakes import LENGTH, speaking
from tests.services.gateway.test_json_repair import FRAMES
from tests.services.gateway.test_tool_parsers import ANSWERS, KIMI, SEEK, calls, read, said
from weft_services.gateway.text.parts import PartKind
from weft_services.gateway.text.tool_formats import FORMATS

TOOL: Any = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TOOLS: Any = [{"type": "function", "function": TOOL}]
ASKED: Any = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "x"}]}
WITH_CALLS = {name: answer for name, answer in ANSWERS.items() if answer[3]}


@pytest.mark.parametrize("name", WITH_CALLS)
def test_cut_answer_has_no_markup_wherever_it_is_cut(name: str) -> None:
    form, written, text, expected = WITH_CALLS[name]
    for end in range(len(written)):
        for pieces in (list(written[:end]), [written[:end]]):
            parts = read(FORMATS[form], pieces, is_cut=True)
            assert said(parts, PartKind.TEXT) == text[:end].rstrip()
            for (found, arguments), (called, whole) in zip(calls(parts), expected, strict=False):
                assert found == called
                assert whole.startswith(arguments)


@pytest.mark.parametrize("name", FRAMES)
def test_cut_arguments_are_a_prefix_of_the_whole(name: str) -> None:
    raw = '{"a": "x\n\\d\\ud83d\\ude42 \\ud83d.", \'b\': [True, 007,], "c": "\x01"}'
    written = FRAMES[name] % raw
    ((_, whole),) = calls(read(FORMATS[name], [written]))
    for end in range(len(written)):
        found = calls(read(FORMATS[name], list(written[:end]), is_cut=True))
        assert all(whole.startswith(arguments) for _, arguments in found)
        assert said(read(FORMATS[name], list(written[:end]), is_cut=True), PartKind.TEXT) == ""


@pytest.mark.parametrize(
    ("name", "written", "text"),
    [
        ("hermes", "a <tool_call>nothing", "a <tool_call>nothing"),
        ("hermes", "a < b", "a < b"),
        ("hermes", "a <tool_ca", "a"),
        ("hermes", "a <tool_call>\n\n", "a"),
        ("qwen-xml", "a <tool_call>\n<func", "a"),
        ("qwen-xml", "a <function=other>", "a <function=other>"),
        ("mistral", "[TOOL_CALLS", ""),
        ("mistral-args", "[TOOL_CALLS]ad", ""),
        ("kimi", "Hm. <|tool_calls_sec", "Hm."),
        ("kimi", f"Hm. {KIMI.split('{}')[0]}<|tool_call_begin|>functions.a", "Hm."),
        ("deepseek-v3", f"{SEEK.split('{}')[0]}<｜tool▁call▁begin｜>function", ""),
        ("llama", '{"name": "ad', ""),
        ("llama", '{"parameters": {"a": 1', ""),
        ("llama", "[add(a=1", ""),
        ("llama", '{"city": "Rom', '{"city": "Rom'),
        ("llama", '{"name": "Ann", "age', '{"name": "Ann", "age'),
    ],
)
def test_what_can_only_be_markup_is_no_text_when_cut(name: str, written: str, text: str) -> None:
    for pieces in (list(written), [written]):
        parts = read(FORMATS[name], pieces, is_cut=True)
        assert (said(parts, PartKind.TEXT), calls(parts)) == (text, [])


@pytest.mark.parametrize(("written", "thoughts"), [("<thi", ""), ("<think>why</th", "why"), ("<think>a < b", "a < b")])
def test_marks_of_thoughts_are_no_text_when_cut(written: str, thoughts: str) -> None:
    parts = read(FORMATS["hermes"], list(written), thinks=True, is_cut=True)
    assert [part.text for part in parts if part.kind is PartKind.TEXT] == []
    assert said(parts, PartKind.REASONING) == thoughts


def test_half_a_call_is_text_when_the_model_ends_it() -> None:
    for written in ("a <tool_ca", 'a <tool_call>{"name": "ad', "a <"):
        assert said(read(FORMATS["hermes"], list(written)), PartKind.TEXT) == written


async def _chat(b: Bench, stream: bool) -> tuple[str, Any]:
    answer = await b.http.post("/v1/chat/completions", json={**ASKED, "tools": TOOLS, "stream": stream})
    assert answer.status_code == 200
    if not stream:
        choice = answer.json()["choices"][0]
        return choice["message"]["content"] or "", choice["finish_reason"]
    chunks = [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(each["delta"].get("content") or "" for each in choices), choices[-1]["finish_reason"]


async def _messages(b: Bench, stream: bool) -> tuple[str, Any]:
    tools = [{"name": "add", "input_schema": TOOL["parameters"]}]
    body = {**ASKED, "tools": tools, "max_tokens": 99, "stream": stream}
    answer = await b.http.post("/v1/messages", json=body)
    assert answer.status_code == 200
    if not stream:
        whole = answer.json()
        return "".join(each.get("text", "") for each in whole["content"]), whole["stop_reason"]
    events = [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: {")]
    text = "".join(each["delta"].get("text", "") for each in events if each["type"] == "content_block_delta")
    return text, next(each["delta"]["stop_reason"] for each in events if each["type"] == "message_delta")


async def _responses(b: Bench, stream: bool) -> tuple[str, Any]:
    body = {"model": MODEL_NAME, "input": "x", "tools": [{"type": "function", **TOOL}], "stream": stream}
    answer = await b.http.post("/v1/responses", json=body)
    assert answer.status_code == 200
    events = [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: {")]
    whole = events[-1]["response"] if stream else answer.json()
    messages = [item for item in whole["output"] if item["type"] == "message"]
    return "".join(each["content"][0]["text"] for each in messages), whole["incomplete_details"]["reason"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("ask", "reason"), [(_chat, "length"), (_messages, "max_tokens"), (_responses, "max_output_tokens")]
)
@pytest.mark.parametrize("said_before", ["", "Looking."])
async def test_every_api_leaves_out_half_a_call(
    bench: MakeBench, ask: Any, reason: str, stream: bool, said_before: str
) -> None:
    async with bench(tool_format="hermes") as b:
        b.decode.script = speaking(b.ids(f'{said_before}\n<tool_call>\n{{"name": "ad'), finish=LENGTH)
        assert await ask(b, stream) == (said_before, reason)


async def test_whole_call_stays_when_the_length_ends_behind_it(bench: MakeBench) -> None:
    async with bench(tool_format="hermes") as b:
        b.decode.script = speaking(b.ids('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_'), finish=LENGTH)
        answer: Any = await b.client.chat.completions.create(**ASKED, tools=TOOLS)
        (call,) = answer.choices[0].message.tool_calls
        assert (call.function.arguments, answer.choices[0].finish_reason) == ('{"a": 1}', "length")
        assert not answer.choices[0].message.content


async def test_arguments_are_closed_when_the_model_ends_within(bench: MakeBench) -> None:
    async with bench(tool_format="hermes") as b:
        b.decode.script = speaking([*b.ids('<tool_call>{"name": "add", "arguments": {"a": 1, "b": "x'), END])
        answer: Any = await b.client.chat.completions.create(**ASKED, tools=TOOLS)
        (call,) = answer.choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"a": 1, "b": "x"}
        assert answer.choices[0].finish_reason == "tool_calls"
