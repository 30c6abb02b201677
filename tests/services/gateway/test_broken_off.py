"""Answers that leave out what their format asks for: thoughts without an end, calls without arguments or tags."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from weft.api_keys import ApiKey
from weft.request import FinishReason
from weft_services.gateway.access import authentication
from weft_services.gateway.access.authentication import Principal
from weft_services.gateway.access.limiter import RateLimiter
from weft_services.gateway.dialects.choices import ChatChoice
from weft_services.gateway.mesh.generation_run import ChoiceUpdate
from weft_services.gateway.mesh.pipeline import charge_on_error
from weft_services.gateway.text.assistant import AnswerReader
from weft_services.gateway.text.parts import PartKind, Parts, joined
from weft_services.gateway.text.tool_formats import DEEPSEEK_V31, HERMES, KIMI, QWEN_XML, ToolFormat
from weft_services.gateway.text.xml_calls import is_text

SCHEMAS: dict[str, dict[str, Any]] = {"edit": {"properties": {"path": {"type": "string"}, "lines": {"type": "array"}}}}


def reader_of(form: ToolFormat, is_thinking: bool = False) -> AnswerReader:
    return AnswerReader(form.parser(SCHEMAS), Parts(lambda: "id"), True, is_thinking, form.ends_thoughts)


def read(form: ToolFormat, text: str, is_thinking: bool = False) -> list[tuple[PartKind, str]]:
    """Letter by letter; however it comes, it is the same."""
    found = []
    for size in (1, 7, len(text)):
        reader = reader_of(form, is_thinking)
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        parts = joined([part for piece in pieces for part in reader.push(piece)] + reader.finish())
        found.append([(part.kind, part.text) for part in parts])
    assert found[0] == found[1] == found[2]
    return found[0]


def test_kimi_goes_from_thoughts_to_a_call_without_a_word() -> None:
    call = "<|tool_call_begin|>functions.ls:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    for written in (f"<|tool_calls_section_begin|>{call}<|tool_calls_section_end|>", call):
        assert read(KIMI, f"I will list it.{written}", is_thinking=True) == [
            (PartKind.REASONING, "I will list it."),
            (PartKind.CALL, "ls"),
            (PartKind.ARGUMENTS, "{}"),
        ]


def test_kimis_call_without_a_number_has_its_tools_name() -> None:
    written = '<|tool_call_begin|>functions.get_weather<|tool_call_argument_begin|>{"city": "Oslo"}<|tool_call_end|>'
    assert read(KIMI, written) == [(PartKind.CALL, "get_weather"), (PartKind.ARGUMENTS, '{"city": "Oslo"}')]


def test_deepseeks_call_without_arguments_ends_where_it_ends() -> None:
    begin, sep, end = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
    assert read(DEEPSEEK_V31, f'{begin}ping{sep}{end}{begin}add{sep}{{"a":1}}{end}') == [
        (PartKind.CALL, "ping"),
        (PartKind.ARGUMENTS, "{}"),
        (PartKind.CALL, "add"),
        (PartKind.ARGUMENTS, '{"a":1}'),
    ]


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("<parameter=path>\na.py\n<parameter=lines>\n[1]\n</parameter>\n</function>", {"path": "a.py", "lines": [1]}),
        ("<parameter=path>\na.py\n</function>", {"path": "a.py"}),
        ("<parameter=lines>\n[1, 2]\n</tool_call>", {"lines": [1, 2]}),
        ("<parameter=path>\na </function> b\n</parameter>\n</function>", {"path": "a </function> b"}),
    ],
)
def test_a_forgotten_tag_ends_the_value_where_the_next_one_begins(written: str, arguments: dict[str, Any]) -> None:
    closing = "" if written.endswith("</tool_call>") else "\n</tool_call>"
    parts = read(QWEN_XML, f"<tool_call>\n<function=edit>\n{written}{closing}Done.")
    assert [kind for kind, _ in parts] == [PartKind.CALL, PartKind.ARGUMENTS, PartKind.TEXT]
    assert (json.loads(parts[1][1]), parts[2][1]) == (arguments, "Done.")


def test_what_every_part_of_a_schema_says_is_said() -> None:
    assert not is_text({"allOf": [{"$ref": "#/$defs/Address"}], "description": "where"})
    assert not is_text({"allOf": [{"type": "integer"}]})
    assert is_text({"allOf": [{"type": "string"}, {"description": "a name"}]})


def test_a_stop_string_within_arguments_is_no_finished_call() -> None:
    call = '<tool_call>{"name": "write", "arguments": {"text": "# a '
    for text, stop, reason in (
        (call, "###", FinishReason.STOP),
        (call + '"}}</tool_call>', None, FinishReason.TOOL_CALLS),
        (call + '"}}</tool_call>\n', "###", FinishReason.TOOL_CALLS),
    ):
        answer = ChatChoice(reader_of(HERMES), None)
        answer.take(ChoiceUpdate(0, text, (), (), FinishReason.STOP, stop))
        assert answer.finish_reason is reason


async def test_a_request_that_nobody_waits_for_any_more_is_counted() -> None:
    limiter, key = RateLimiter(), ApiKey("alice", "0" * 64, requests_per_minute=10)
    token = authentication.current_principal.set(Principal(key, limiter))
    try:
        with pytest.raises(asyncio.CancelledError), charge_on_error():
            raise asyncio.CancelledError
        assert [level.remaining for level in limiter.levels(key)] == [9]
    finally:
        authentication.current_principal.reset(token)
