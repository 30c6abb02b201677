"""Answers in channels, as gpt-oss writes them: thoughts, text and calls in every API, and what grammars allow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
import pytest
from tokenizers import AddedToken, Tokenizer

from tests.services.gateway.conftest import END, MODEL_NAME, MakeBench, tiny_tokenizer, write_model
from tests.services.gateway.fakes import speaking
from tests.services.gateway.test_continued import prompt
from tests.services.gateway.test_tool_parsers import cuts, said
from tests.services.gateway.tool_answers import SCHEMAS
from weft_services.gateway.generation import Conversation
from weft_services.gateway.text.assistant import AnswerReader
from weft_services.gateway.text.chat_template import ChatTemplate
from weft_services.gateway.text.harmony import FINAL, MARKS, harmony
from weft_services.gateway.text.parts import PartKind, Parts, new_call_id

TEMPLATE = (
    "{%- for m in messages %}<|start|>{{ m.role }}"
    "{%- if m.tool_calls %}{% set f = m.tool_calls[0].function %} to=functions.{{ f.name }}<|channel|>commentary json"
    "<|message|>{{ f.arguments | tojson }}<|call|>"
    "{%- elif m.role == 'assistant' %}<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{%- else %}<|message|>{{ m.content }}<|end|>{% endif %}"
    "{%- endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    "{# <|channel|>analysis<|message|> #}"
)
THOUGHTS = "<|channel|>analysis<|message|>Hm, so.<|end|><|start|>assistant"
MORE = "<|channel|>analysis<|message|>I need it.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}'
TEXT = "<|channel|>final<|message|>It is 7."
ADD: Any = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": ADD}}
STRICT: Any = {"type": "function", "function": {**TOOL["function"], "strict": True}}
USER: Any = {"role": "user", "content": "hi"}
NAMES = tuple(SCHEMAS)


def harmony_tokenizer() -> Tokenizer:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    return tokenizer


@pytest.fixture
def harmony_model(tmp_path: Path) -> str:
    return str(write_model(tmp_path, harmony_tokenizer(), TEMPLATE, 4096))


@pytest.mark.parametrize(
    ("begun", "written", "expected"),
    [
        ("", f"{THOUGHTS}{TEXT}<|return|>", ("Hm, so.", "It is 7.", [])),
        ("", f"{THOUGHTS}{PREAMBLE}{MORE}{TEXT}", ("Hm, so.\nI need it.", "Let me see.\nIt is 7.", [])),
        ("", f"{THOUGHTS}{PREAMBLE}{CALL}<|call|>", ("Hm, so.", "Let me see.", ["add"])),
        ("", "<|channel|>analysis<|message|>Hm", ("Hm", "", [])),
        ("", "<|channel|>analysis to=python code<|message|>1 + 1<|call|>", ("1 + 1", "", [])),
        ("", '<|channel|>analysis to=functions.add<|message|>{"a": 1}', ("", "", ["add"])),
        ("", '<|channel|>commentary to=functions.new<|message|>{"a": 1}', ("", "", ["new"])),
        ("", "Hello, <|world|>.", ("", "Hello, <|world|>.", [])),
        ("", "<|message|>Hello.<|end|>", ("", "Hello.", [])),
        ("", "<|channel|>final", ("", "", [])),
        ("", "", ("", "", [])),
        (FINAL, "and more.<|return|>", ("", "and more.", [])),
        ("<|channel|>analysis<|message|>", f"and more.<|end|><|start|>assistant{TEXT}", ("and more.", "It is 7.", [])),
    ],
)
def test_harmony_reads_channels(begun: str, written: str, expected: tuple[str, str, list[str]]) -> None:
    for pieces in cuts(written):
        reader = AnswerReader(
            harmony(NAMES, begun), Parts(new_call_id), thinks=False, is_thinking=begun not in ("", FINAL)
        )
        parts = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
        names = [part.text for part in parts if part.kind is PartKind.CALL]
        assert (said(parts, PartKind.REASONING), said(parts, PartKind.TEXT), names) == expected
        assert not reader.is_thinking or "<|end|>" not in written


def test_harmony_call_is_text_without_tools() -> None:
    reader = AnswerReader(harmony(None), Parts(new_call_id), thinks=False)
    parts = [*reader.push(f"{CALL}<|call|>"), *reader.finish()]
    assert (said(parts, PartKind.TEXT), len(parts)) == ('{"a": 1}', 1)


@pytest.mark.parametrize("wants_tools", [True, False])
async def test_chat_separates_channels(bench: MakeBench, harmony_model: str, wants_tools: bool) -> None:
    tokenizer = harmony_tokenizer()
    answer = (
        f"{THOUGHTS}{PREAMBLE}{MORE}{CALL}<|call|>" if wants_tools else f"{THOUGHTS}{PREAMBLE}{MORE}{TEXT}<|return|>"
    )
    async with bench(model=harmony_model) as b:
        b.decode.script = speaking([*tokenizer.encode(answer).ids, END])
        asked: Any = {"model": MODEL_NAME, "messages": [USER], **({"tools": [TOOL]} if wants_tools else {})}
        whole: Any = await b.client.chat.completions.create(**asked)
        message, usage = whole.choices[0].message, whole.usage
        assert message.reasoning_content == "Hm, so.\nI need it."
        assert message.content == ("Let me see." if wants_tools else "Let me see.\nIt is 7.")
        assert whole.choices[0].finish_reason == ("tool_calls" if wants_tools else "stop")
        called = [(each.function.name, each.function.arguments) for each in message.tool_calls or []]
        assert called == ([("add", '{"a": 1}')] if wants_tools else [])
        thoughts = [tokenizer.encode(f"<|message|>{each}<|end|>").ids for each in ("Hm, so.", "I need it.")]
        assert usage.completion_tokens_details.reasoning_tokens == sum(map(len, thoughts))
        stream = await b.client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        chunks: list[Any] = [chunk async for chunk in stream]
        deltas = [chunk.choices[0].delta.model_dump() for chunk in chunks if chunk.choices]
        assert "".join(each.get("reasoning_content") or "" for each in deltas) == message.reasoning_content
        assert "".join(each.get("content") or "" for each in deltas) == message.content
        assert chunks[-1].usage == usage


async def test_responses_separate_channels(bench: MakeBench, harmony_model: str) -> None:
    answer = f"{THOUGHTS}{PREAMBLE}{CALL}<|call|>"
    async with bench(model=harmony_model) as b:
        b.decode.script = speaking([*harmony_tokenizer().encode(answer).ids, END])
        tool: Any = {"type": "function", "strict": False, **TOOL["function"]}
        whole: Any = await b.client.responses.create(model=MODEL_NAME, input="hi", tools=[tool])
        stream: Any = await b.client.responses.create(model=MODEL_NAME, input="hi", tools=[tool], stream=True)
        for response in (whole, [event async for event in stream][-1].response):
            thoughts, text, call = response.output
            assert (thoughts.type, text.type, call.type) == ("reasoning", "message", "function_call")
            assert (thoughts.content[0].text, text.content[0].text) == ("Hm, so.", "Let me see.")
            assert (call.name, call.arguments) == ("add", '{"a": 1}')


async def test_messages_separate_channels(bench: MakeBench, harmony_model: str) -> None:
    answer = f"{THOUGHTS}{PREAMBLE}{CALL}<|call|>"
    async with bench(model=harmony_model) as b, anthropic.AsyncAnthropic(base_url=b.url, api_key="x") as sdk:
        b.decode.script = speaking([*harmony_tokenizer().encode(answer).ids, END])
        asked: Any = {
            "model": MODEL_NAME,
            "max_tokens": 500,
            "messages": [USER],
            "tools": [{"name": "add", "input_schema": ADD}],
        }
        whole: Any = await sdk.messages.create(**asked)
        async with sdk.messages.stream(**asked) as stream:
            streamed: Any = await stream.get_final_message()
        for message in (whole, streamed):
            thoughts, text, call = message.content
            assert (thoughts.type, text.type, call.type) == ("thinking", "text", "tool_use")
            assert (thoughts.thinking, text.text) == ("Hm, so.", "Let me see.")
            assert (call.name, call.input) == ("add", {"a": 1})
            assert message.stop_reason == "tool_use"


FORCED: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required"}
SCHEMA: dict[str, Any] = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": ADD}}}
JSON = '<|channel|>final<|message|>{"a": 1}'


@pytest.mark.parametrize(
    ("fields", "text", "is_kept"),
    [
        (FORCED, CALL, True),
        (FORCED, f"{THOUGHTS}{MORE}{CALL}", True),
        (FORCED, f"{THOUGHTS}{TEXT}", False),
        (FORCED, CALL.replace("add", "sub"), False),
        (FORCED, CALL.replace("1", '"'), False),
        (FORCED, "Hello", False),
        ({"tools": [STRICT]}, f"{THOUGHTS}{TEXT}", True),
        ({"tools": [STRICT]}, f"{THOUGHTS}{CALL}", True),
        ({"tools": [STRICT]}, CALL.replace("1", '"'), False),
        (SCHEMA, f"{THOUGHTS}{JSON}", True),
        (SCHEMA, f"{THOUGHTS}{TEXT}", False),
        ({**SCHEMA, "tools": [TOOL]}, JSON, True),
        ({**SCHEMA, "tools": [TOOL]}, f"{MORE}{CALL}", True),
        ({**SCHEMA, "tools": [TOOL]}, TEXT, False),
    ],
)
async def test_grammar_of_channels(
    bench: MakeBench, harmony_model: str, fields: dict[str, Any], text: str, is_kept: bool
) -> None:
    async with bench(model=harmony_model) as b:
        b.tokenizer = harmony_tokenizer()
        body = {"model": MODEL_NAME, "messages": [USER], **fields}
        assert (await b.http.post("/v1/chat/completions", json=body)).status_code == 200
        assert b.allows(text, is_whole=is_kept) == is_kept


BEGUN: Any = {"role": "assistant", "content": '{"a"'}
CONTINUED = {"messages": [USER, BEGUN], "continue_final_message": True, "add_generation_prompt": False}


async def test_continued_message_stays_in_its_channel(bench: MakeBench, harmony_model: str) -> None:
    async with bench(model=harmony_model) as b:
        b.tokenizer = harmony_tokenizer()
        b.decode.script = speaking([*b.ids(": 1}<|return|>"), END])
        body: Any = {"model": MODEL_NAME, **CONTINUED}
        answer = (await b.http.post("/v1/chat/completions", json=body)).json()
        assert answer["choices"][0]["message"]["content"] == ": 1}"
        assert prompt(b).endswith('<|start|>assistant<|channel|>final<|message|>{"a"')
        assert (await b.http.post("/v1/chat/completions", json=body | SCHEMA)).status_code == 200
        assert b.allows('{"a": 1}')
        refused = await b.http.post("/v1/chat/completions", json=body | FORCED)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")


def test_text_and_thoughts_before_a_call_are_rendered() -> None:
    source = TEMPLATE.replace(
        "{% set f", "{% if m.content and m.thinking %}{{ raise_exception('both') }}{% endif %}{{ m.thinking }}{% set f"
    )
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    said = {"role": "assistant", "content": "Let me see.", "reasoning_content": "Hm.", "tool_calls": [call]}
    text = ChatTemplate(source, {}).render(Conversation((USER, said, {"role": "tool", "content": "7"})))
    assert "assistantHm.\n\nLet me see. to=functions.add" in text
    alone = ChatTemplate(source, {}).render(Conversation((USER, {**said, "reasoning_content": "", "content": ""})))
    assert "assistant to=functions.add" in alone


async def test_stop_string_is_found_in_the_text_of_channels(bench: MakeBench, harmony_model: str) -> None:
    async with bench(model=harmony_model) as b:
        b.tokenizer = harmony_tokenizer()
        b.decode.script = speaking([*b.ids(f"{THOUGHTS}{TEXT}<|return|>"), END])
        body = {"model": MODEL_NAME, "messages": [USER], "stop": ["so"], "logprobs": True}
        answer = (await b.http.post("/v1/chat/completions", json=body)).json()["choices"][0]
        assert answer["message"]["content"] == "It is 7."
        body["stop"] = [" is"]
        answer = (await b.http.post("/v1/chat/completions", json=body)).json()["choices"][0]
        assert (answer["message"]["content"], answer["finish_reason"]) == ("It", "stop")
