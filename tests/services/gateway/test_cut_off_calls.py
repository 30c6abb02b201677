"""Answers that end within a call, by every API: half a call is no text, and no error."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.services.gateway.conftest import END, MODEL_NAME, Bench, MakeBench
from tests.services.gateway.fakes import LENGTH, speaking
from tests.services.gateway.tool_answers import SCHEMAS
from weft.request import FinishReason
from weft_services.gateway.dialects.answers import ChatChoice
from weft_services.gateway.mesh.choice_text import ChoiceUpdate
from weft_services.gateway.text.assistant import AnswerReader
from weft_services.gateway.text.parts import Parts
from weft_services.gateway.text.tool_formats import HERMES

TOOL: Any = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TOOLS: Any = [{"type": "function", "function": TOOL}]
ASKED: Any = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "x"}]}


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


@pytest.mark.parametrize("stream", [False, True])
async def test_a_python_value_that_json_has_not_does_not_cost_the_answer(bench: MakeBench, stream: bool) -> None:
    written = "[add(a={1, 2})]"
    tools: Any = [{"type": "function", "function": {"name": "add"}}]
    async with bench(tool_format="llama") as b:
        b.decode.script = speaking([*b.ids(written), END])
        body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "x"}], "tools": tools, "stream": stream}
        answer = await b.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200
        assert '"error"' not in answer.text
        if not stream:
            assert json.loads(answer.text)["choices"][0]["message"]["content"] == written


def test_a_stop_string_within_arguments_is_no_finished_call() -> None:
    call = '<tool_call>{"name": "write", "arguments": {"text": "# a '
    for text, stop, reason in (
        (call, "###", FinishReason.STOP),
        (call + '"}}</tool_call>', None, FinishReason.TOOL_CALLS),
        (call + '"}}</tool_call>\n', "###", FinishReason.TOOL_CALLS),
    ):
        answer = ChatChoice(AnswerReader(HERMES.parser(SCHEMAS), Parts(lambda: "id"), True), None)
        answer.take(ChoiceUpdate(0, text, (), (), FinishReason.STOP, stop))
        assert answer.finish_reason is reason
