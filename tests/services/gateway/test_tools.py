"""Tools through the official client: what its own stream helpers join, choices that force calls, what is refused."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.services.gateway.conftest import END, MODEL_NAME, MakeBench
from tests.services.gateway.fakes import LENGTH, STOP, SequenceDelta, deltas, speaking

USER: Any = {"role": "user", "content": "weather?"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
NOW: Any = {"type": "function", "function": {"name": "now"}}
TOO_LARGE: Any = {"type": "function", "function": {"name": "f", "parameters": {"multipleOf": 99731}}}
CALLS = (
    'Looking.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)


def allowed(mode: str, tools: list[Any]) -> dict[str, Any]:
    """OpenAI's word for: of all these tools, only some."""
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def arguments_in(chunks: list[Any]) -> str:
    """All that was said so far of the arguments of all calls."""
    parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or []]
    return "".join(part.function.arguments or "" for part in parts)


async def test_a_whole_answer_has_its_calls(bench: MakeBench) -> None:
    async with bench(tool_format="hermes") as b:
        b.decode.script = speaking([*b.ids(CALLS), END])
        answer = await b.client.chat.completions.create(model=MODEL_NAME, messages=[USER], tools=TOOLS)
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Looking."
        calls: Any = choice.message.tool_calls
        assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
            ("get_weather", {"city": "Rome"}),
            ("now", {}),
        ]
        assert len({call.id for call in calls}) == 2
        # and the conversation goes on
        results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in calls]
        messages: Any = [USER, choice.message.model_dump(exclude_none=True), *results]
        await b.client.chat.completions.create(model=MODEL_NAME, messages=messages, tools=TOOLS)
        assert '"city": "Rome"' in b.tokenizer.decode(list(b.decode.started[1].token_ids), skip_special_tokens=False)


async def test_a_stream_joins_to_the_same_by_the_sdks_own_helper(bench: MakeBench) -> None:
    async with bench(tool_format="hermes") as b:
        token_ids, heard = [*b.ids(CALLS), END], asyncio.Event()

        async def script(start: Any) -> Any:
            for number, delta in enumerate(deltas(start, token_ids)):
                if number == len(b.ids(CALLS[: CALLS.index("Rome")])):
                    await heard.wait()
                yield delta

        b.decode.script = script
        asked: Any = {"model": MODEL_NAME, "messages": [USER], "tools": TOOLS}
        chunks = []
        async with b.client.chat.completions.stream(**asked) as stream:
            async for event in stream:
                if event.type == "chunk":
                    chunks.append(event.chunk)
                    if '"city"' in arguments_in(chunks):
                        heard.set()  # the rest is not said before that: arguments come while they are written
            final = await stream.get_final_completion()
        calls: Any = final.choices[0].message.tool_calls
        assert [(call.function.name, call.function.arguments) for call in calls] == [
            ("get_weather", '{"city": "Rome"}'),
            ("now", "{}"),
        ]
        assert final.choices[0].finish_reason == "tool_calls"
        assert final.choices[0].message.content == "Looking."
        parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or []]
        for index in (0, 1):
            mine = [part for part in parts if part.index == index]
            # id, type and name once, then arguments alone; none of the rest is empty
            assert mine[0].id is not None
            assert all(part.id is None and part.type is None for part in mine[1:])
            assert all(part.function and part.function.name is None and part.function.arguments for part in mine[1:])
        assert heard.is_set()


async def test_a_call_that_completes_within_the_last_delta_is_whole(bench: MakeBench) -> None:
    async with bench(tool_format="hermes") as b:
        ids = b.ids('<tool_call>{"name": "now", "arguments": {"zone": "utc"}}</tool_call>')

        async def script(start: Any) -> Any:
            yield SequenceDelta(key=start.key, token_ids=[*ids, END], finish_reason=STOP)

        b.decode.script = script
        asked: Any = {"model": MODEL_NAME, "messages": [USER], "tools": TOOLS}
        async with b.client.chat.completions.stream(**asked) as stream:
            final = await stream.get_final_completion()
        calls: Any = final.choices[0].message.tool_calls
        assert (calls[0].function.name, calls[0].function.arguments) == ("now", '{"zone": "utc"}')
        assert final.choices[0].finish_reason == "tool_calls"


async def test_an_answer_that_is_cut_off_says_length(bench: MakeBench) -> None:
    async with bench(tool_format="hermes") as b:
        b.decode.script = speaking(b.ids(CALLS)[:-20], finish=LENGTH)
        answer = await b.client.chat.completions.create(model=MODEL_NAME, messages=[USER], tools=TOOLS)
        assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
async def test_several_choices_have_calls_of_their_own(bench: MakeBench, stream: bool) -> None:
    async with bench(tool_format="hermes") as b:
        b.decode.script = speaking([*b.ids(CALLS), END])
        asked: Any = {"model": MODEL_NAME, "messages": [USER], "tools": TOOLS, "n": 2, "parallel_tool_calls": False}
        if stream:
            async with b.client.chat.completions.stream(**asked) as running:
                answer: Any = await running.get_final_completion()
        else:
            answer = await b.client.chat.completions.create(**asked)
        ids = [[call.id for call in choice.message.tool_calls] for choice in answer.choices]
        assert [len(each) for each in ids] == [1, 1]
        assert ids[0] != ids[1]


@pytest.mark.parametrize(
    ("choice", "good", "bad"),
    [
        ("required", CALLS.removeprefix("Looking.\n"), "Looking"),
        ("required", '<tool_call>{"name": "now", "arguments": {}}</tool_call>', '<tool_call>{"name": "later"'),
        (
            {"type": "function", "function": {"name": "get_weather"}},
            '<tool_call>{"name": "get_weather", "arguments": {"city": "x"}}</tool_call>',
            '<tool_call>{"name": "now"',
        ),
        (
            allowed("required", [NOW]),
            '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
            '<tool_call>{"name": "get_weather"',
        ),
        (
            allowed("auto", [NOW]),
            'Well. <tool_call>{"name": "now", "arguments": {}}</tool_call>',
            'Well. <tool_call>{"name": "get_weather"',
        ),
    ],
)
async def test_a_forced_call_is_all_that_can_be_written(bench: MakeBench, choice: Any, good: str, bad: str) -> None:
    async with bench(tool_format="hermes") as b:
        await b.client.chat.completions.create(model=MODEL_NAME, messages=[USER], tools=TOOLS, tool_choice=choice)
        assert b.allows(good)
        assert not b.allows(bad, is_whole=False)


async def test_a_forced_call_in_tags_has_the_types_of_its_schema(bench: MakeBench) -> None:
    schema = {
        "properties": {
            "path": {"type": "string"},
            "mode": {"type": "string", "enum": ["r", "w"]},
            "sizes": {"type": "array", "items": {"$ref": "#/$defs/size"}},
        },
        "required": ["path", "sizes"],
        "$defs": {"size": {"type": "integer"}},
    }
    tools: Any = [{"type": "function", "function": {"name": "write", "parameters": schema, "strict": True}}]
    opening, end = "<tool_call>\n<function=write>\n", "</function>\n</tool_call>"
    path = "<parameter=path>\n/tmp/<x>\n\n</parameter>\n"
    sizes = "<parameter=sizes>\n[1, 2]\n</parameter>\n"
    written = {
        f"{opening}{path}{sizes}{end}": True,
        f"{opening}{path}<parameter=mode>\nw\n</parameter>\n{sizes}{end}": True,
        f"{opening}{path}<parameter=mode>\na": False,
        f"{opening}{sizes}": False,
        f"{opening}{path}{end}": False,
        f'{opening}{path}<parameter=sizes>\n["a"': False,
        "Text": False,
    }
    async with bench(tool_format="qwen-xml") as b:
        b.decode.script = speaking([*b.ids(next(iter(written))), END])
        asked: Any = {"model": MODEL_NAME, "messages": [USER], "tools": tools, "tool_choice": "required"}
        answer: Any = await b.client.chat.completions.create(**asked)
        (call,) = answer.choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"path": "/tmp/<x>\n", "sizes": [1, 2]}
        for text, is_kept in written.items():
            assert b.allows(text, is_whole=is_kept) == is_kept, text


async def test_a_strict_tool_leaves_the_choice_free_and_its_arguments_not(bench: MakeBench) -> None:
    async with bench(tool_format="hermes") as b:
        strict: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA, "strict": True}}]
        await b.client.chat.completions.create(model=MODEL_NAME, messages=[USER], tools=strict)
        call = '<tool_call>{"name": "get_weather", "arguments": {"city": '
        assert b.allows("Just text <b>.")
        assert b.allows(f'So {call}"x"}}}}</tool_call>')
        assert not b.allows(f"{call}7", is_whole=False)


async def test_without_tools_nothing_is_taken_for_a_call(bench: MakeBench) -> None:
    async with bench(tool_format="hermes") as b:
        b.decode.script = speaking([*b.ids(CALLS), END])
        for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            asked: Any = {"model": MODEL_NAME, "messages": [USER], **fields}
            answer = await b.client.chat.completions.create(**asked)
            assert answer.choices[0].message.content == CALLS
            assert answer.choices[0].message.tool_calls is None
            assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "later"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": allowed("any", [NOW])}, "tool_choice.allowed_tools.mode"),
        ({"tools": TOOLS, "tool_choice": allowed("auto", [])}, "tool_choice.allowed_tools.tools"),
        ({"tools": TOOLS, "tool_choice": allowed("auto", [NOW, 1])}, "tool_choice.allowed_tools.tools.1"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"tools": TOOLS, "parallel_tool_calls": "yes"}, "parallel_tool_calls"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}, TOOLS[0]]},
            "tools.0.function.parameters",
        ),
        (
            {
                "tools": [TOO_LARGE],
                "tool_choice": "required",
            },
            "tools.0.function.parameters",
        ),
        # one grammar is made of all, also of those that need not be called, or not strictly
        ({"tools": [NOW, TOO_LARGE], "response_format": {"type": "json_object"}}, "tools.1.function.parameters"),
        (
            {"tools": [{"type": "function", "function": {"name": "now", "strict": True}}, TOO_LARGE]},
            "tools.1.function.parameters",
        ),
    ],
)
async def test_what_makes_no_sense_is_refused(bench: MakeBench, fields: dict[str, Any], param: str) -> None:
    async with bench(tool_format="hermes") as b:
        status, error = await b.refused("/v1/chat/completions", messages=[USER], **fields)
        assert (status, error["param"]) == (400, param)


async def test_a_model_whose_format_is_not_known_cannot_be_made_to_call(bench: MakeBench) -> None:
    async with bench() as b:
        status, error = await b.refused("/v1/chat/completions", messages=[USER], tools=TOOLS, tool_choice="required")
        assert (status, error["param"]) == (400, "tool_choice")
        assert "WEFT_TOOL_FORMAT" in error["message"]
