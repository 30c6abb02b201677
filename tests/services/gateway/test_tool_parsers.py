"""Tool calls of every served family, in pieces of any size: the same calls, the same text, nothing of a marker told."""

from __future__ import annotations

import json
import string
from random import Random
from typing import Any

import pytest

from weft_services.gateway.text.assistant import AnswerReader
from weft_services.gateway.text.parts import Part, PartKind, Parts
from weft_services.gateway.text.tool_formats import FORMATS, ToolFormat, choose_format

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {"properties": {"city": {"type": "string"}, "n": {"type": "array"}}},
    "add": {"properties": {"a": {"type": "integer"}, "b": {"anyOf": [{"type": "number"}, {"type": "null"}]}}},
}
SEEK = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
SEEK_V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
SEEK_V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
KIMI = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
KIMI_CALL = "<|tool_call_begin|>functions.{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
ROME = '{"city": "Rome <\\"}{[\\\\", "n": [1, {"a": null}]}'
ADD = '{"a": 1, "b": -2.5e3}'
BOTH = [("get_weather", ROME), ("add", ADD)]

# format, what the model writes, its text, its calls
ANSWERS: dict[str, tuple[str, str, str, list[tuple[str, str]]]] = {
    "hermes": (
        "hermes",
        f'Let me see.\n<tool_call>\n{{"name": "get_weather", "arguments": {ROME}}}\n</tool_call>\n'
        f'<tool_call>{{"name": "add", "arguments": {ADD}}}</tool_call>',
        "Let me see.",
        BOTH,
    ),
    "hermes, arguments first": (
        "hermes",
        f'<tool_call>{{"arguments": {ADD}, "name": "add"}}</tool_call>',
        "",
        [BOTH[1]],
    ),
    "hermes, arguments as a string": (
        "hermes",
        f'<tool_call>{{"name": "add", "arguments": {json.dumps(ADD)}}}</tool_call>',
        "",
        [BOTH[1]],
    ),
    "hermes, no arguments": ("hermes", '<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
    "hermes, null arguments": (
        "hermes",
        '<tool_call>{"name": "add", "arguments": null}</tool_call>',
        "",
        [("add", "{}")],
    ),
    "hermes, no end tag": ("hermes", f'<tool_call>{{"name": "add", "arguments": {ADD}}}', "", [BOTH[1]]),
    "hermes, ended within": ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1', "", [("add", '{"a": 1}')]),
    "hermes, broken": (
        "hermes",
        "Well <tool_call>nothing</tool_call> so",
        "Well <tool_call>nothing</tool_call> so",
        [],
    ),
    "hermes, cut before the name": ("hermes", 'x <tool_call>{"na', 'x <tool_call>{"na', []),
    "hermes, no call": ("hermes", "a < b <tool and so on <tool_cal", "a < b <tool and so on <tool_cal", []),
    "xml": (
        "qwen-xml",
        'Let me see.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nRome "<b>\n\n</parameter>\n'
        '<parameter=n>\n[1, {"a": null}]\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nNone\n</parameter>\n"
        "<parameter=c>7</parameter></function>\n</tool_call>",
        "Let me see.",
        [
            ("get_weather", '{"city": "Rome \\"<b>\\n", "n": [1, {"a": null}]}'),
            ("add", '{"a": 1, "b": null, "c": "7"}'),
        ],
    ),
    "xml, no arguments": ("qwen-xml", "<tool_call>\n<function=add>\n</function>\n</tool_call>", "", [("add", "{}")]),
    "xml, no outer tag": (
        "qwen-xml",
        "<function=add>\n<parameter=a>\nmany\n</parameter>\n</function>",
        "",
        [("add", '{"a": "many"}')],
    ),
    "xml, ended within": (
        "qwen-xml",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nRo",
        "",
        [("get_weather", '{"city": "Ro"}')],
    ),
    "xml, no call": ("qwen-xml", "a <tool_call>b <function=c\nd", "a <tool_call>b <function=c\nd", []),
    "mistral list": (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {ROME}}}, {{"name": "add", "arguments": {ADD}}}]',
        "",
        BOTH,
    ),
    "mistral names": (
        "mistral-args",
        f"Sure.[TOOL_CALLS]get_weather[ARGS]{ROME}[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{ADD}",
        "Sure.",
        BOTH,
    ),
    "deepseek v3": (
        "deepseek-v3",
        "Now. " + SEEK.format(SEEK_V3.format("get_weather", ROME) + "\n" + SEEK_V3.format("add", ADD)),
        "Now.",
        BOTH,
    ),
    "deepseek v3.1": (
        "deepseek-v3.1",
        SEEK.format(SEEK_V31.format("get_weather", ROME) + SEEK_V31.format("add", ADD)),
        "",
        BOTH,
    ),
    "kimi": (
        "kimi",
        "Hm." + KIMI.format(KIMI_CALL.format("get_weather:0", ROME) + KIMI_CALL.format("add:1", ADD)),
        "Hm.",
        BOTH,
    ),
    "llama": (
        "llama",
        f'{{"name": "get_weather", "parameters": {ROME}}}; {{"name": "add", "parameters": {ADD}}}',
        "",
        BOTH,
    ),
    "llama with a tag": (
        "llama",
        f'<|python_tag|>{{"type": "function", "name": "add", "parameters": {ADD}}}',
        "",
        [BOTH[1]],
    ),
    "llama, an object that is no call": ("llama", '{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', []),
    "llama, text": ("llama", "The answer is {x}.", "The answer is {x}.", []),
    "llama in python": (
        "llama",
        "<|python_start|>[add(a=1, b=[True, None, 'x)]']), get_weather()]<|python_end|>",
        "",
        [("add", '{"a": 1, "b": [true, null, "x)]"]}'), ("get_weather", "{}")],
    ),
    "llama, a list that is no call": ("llama", "[1, 2] is a list", "[1, 2] is a list", []),
    "llama, python that is no call": ("llama", "[open('/etc/passwd')]", "[open('/etc/passwd')]", []),
}


def read(
    tool_format: ToolFormat,
    pieces: list[str],
    thinks: bool = False,
    is_thinking: bool = False,
    is_cut: bool = False,
) -> list[Part]:
    reader = AnswerReader(tool_format.parser(SCHEMAS), Parts(tool_format.new_id), thinks, is_thinking)
    parts = [part for piece in pieces for part in reader.push(piece)]
    return parts + reader.finish(is_cut)


def said(parts: list[Part], kind: PartKind) -> str:
    return "".join(part.text for part in parts if part.kind is kind)


def calls(parts: list[Part]) -> list[tuple[str, str]]:
    begun = [part for part in parts if part.kind is PartKind.CALL]
    assert [part.call for part in begun] == list(range(len(begun)))
    assert len({part.call_id for part in begun}) == len(begun)
    arguments = [
        "".join(p.text for p in parts if p.kind is PartKind.ARGUMENTS and p.call == call.call) for call in begun
    ]
    return list(zip((part.text for part in begun), arguments, strict=True))


def cuts(text: str) -> list[list[str]]:
    random = Random(3)
    sizes = [[1] * len(text), [len(text)], *([random.randint(1, 9) for _ in text] for _ in range(20))]
    out = []
    for each in sizes:
        pieces, at = [], 0
        for size in each:
            pieces.append(text[at : at + size])
            at += size
        out.append([piece for piece in pieces if piece])
    return out


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_calls_and_text_are_found_however_the_answer_is_cut(
    answer: tuple[str, str, str, list[tuple[str, str]]],
) -> None:
    name, written, text, expected = answer
    for pieces in cuts(written):
        parts = read(FORMATS[name], pieces)
        assert said(parts, PartKind.TEXT) == text
        assert calls(parts) == expected
        assert all(part.text for part in parts)


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_a_call_begins_before_its_arguments_and_no_part_is_out_of_order(
    answer: tuple[str, str, str, list[tuple[str, str]]],
) -> None:
    parts = read(FORMATS[answer[0]], list(answer[1]))
    last = -1
    for part in parts:
        if part.kind is PartKind.CALL:
            assert part.call == last + 1
            last = part.call
        elif part.kind is PartKind.ARGUMENTS:
            assert part.call == last


def test_arguments_stream_as_they_are_written() -> None:
    reader = AnswerReader(FORMATS["hermes"].parser(SCHEMAS), Parts(FORMATS["hermes"].new_id), thinks=False)
    assert [part.kind for part in reader.push('<tool_call>{"name": "add", "arguments": ')] == []
    assert [part.kind for part in reader.push('{"a": ')] == [PartKind.CALL, PartKind.ARGUMENTS]
    assert [part.text for part in reader.push('1, "b"')] == ['1, "b"']
    assert [part.text for part in reader.push(": 2}}")] == [": 2}"]


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_call_is_open_when_its_arguments_are_cut_off(answer: tuple[str, str, str, list[tuple[str, str]]]) -> None:
    """At every cut: open exactly while the arguments of the last call are not yet JSON."""
    name, written, _, _ = answer
    for end in range(len(written) + 1):
        reader = AnswerReader(FORMATS[name].parser(SCHEMAS), Parts(FORMATS[name].new_id), thinks=False)
        parts = [*reader.push(written[:end]), *reader.finish(is_cut=True)]
        calls = [part.call for part in parts if part.kind is PartKind.CALL]
        told = "".join(part.text for part in parts if part.kind is PartKind.ARGUMENTS and part.call == calls[-1])
        assert reader.is_in_call is (bool(calls) and not is_json(told)), written[:end]


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def test_ids_are_what_the_family_expects() -> None:
    kimi = [part for part in read(FORMATS["kimi"], [ANSWERS["kimi"][1]]) if part.kind is PartKind.CALL]
    assert [part.call_id for part in kimi] == ["functions.get_weather:0", "functions.add:1"]
    for name in ("mistral list", "mistral names"):
        found = [part for part in read(FORMATS["mistral"], [ANSWERS[name][1]]) if part.kind is PartKind.CALL]
        assert all(
            len(part.call_id) == 9 and set(part.call_id) <= set(string.ascii_letters + string.digits) for part in found
        )


@pytest.mark.parametrize(
    ("written", "is_thinking", "reasoning", "text"),
    [
        ("<think>\nwhy?\n</think>\n\nBecause.", False, "why?", "Because."),
        ("why?\n</think>\nBecause.", True, "why?", "Because."),
        ("<think>never ends", False, "never ends", ""),
        ("No <think>thoughts</think>.", False, "", "No <think>thoughts</think>."),
        ("<think></think>Yes", False, "", "Yes"),
    ],
)
def test_thoughts_are_told_from_text(written: str, is_thinking: bool, reasoning: str, text: str) -> None:
    for pieces in cuts(written):
        parts = read(FORMATS["hermes"], pieces, thinks=True, is_thinking=is_thinking)
        assert (said(parts, PartKind.REASONING).strip(), said(parts, PartKind.TEXT)) == (reasoning, text)


def test_a_call_after_thoughts_is_found() -> None:
    parts = read(FORMATS["hermes"], list(f"<think>hm</think>\n{ANSWERS['hermes'][1]}"), thinks=True)
    assert said(parts, PartKind.REASONING) == "hm"
    assert calls(parts) == BOTH


def test_only_the_first_of_several_calls_where_one_is_wanted() -> None:
    for name in ("hermes", "mistral list", "kimi", "deepseek v3"):
        tool_format = FORMATS[ANSWERS[name][0]]
        reader = AnswerReader(tool_format.parser(SCHEMAS), Parts(tool_format.new_id, is_parallel=False), thinks=False)
        parts = [*reader.push(ANSWERS[name][1]), *reader.finish()]
        assert calls(parts) == BOTH[:1]


def test_a_long_hostile_answer_takes_linear_time() -> None:
    for written in ("<tool_call>" * 3000, "{" * 20_000, "[" * 20_000, '<tool_call>{"name": "' + "\\" * 20_000):
        for name in ("hermes", "llama", "mistral", "qwen-xml"):
            parts = read(FORMATS[name], [written[at : at + 50] for at in range(0, len(written), 50)])
            assert not calls(parts)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("<tool_call><function=x>", "qwen-xml"),
        ("<tool_call><arg_key>", None),
        ("[TOOL_CALLS]", "mistral"),
        ("[TOOL_CALLS][ARGS]", "mistral-args"),
        ("<｜tool▁calls▁begin｜> ```json", "deepseek-v3"),
        ("<｜tool▁calls▁begin｜>", "deepseek-v3.1"),
        ("<|tool_calls_section_begin|>", "kimi"),
        ("{% if tools %}<|python_tag|>", "llama"),
        ("plain", None),
    ],
)
def test_the_format_is_the_templates(template: str, name: str | None) -> None:
    chosen = choose_format("auto", template)
    assert (chosen.name if chosen else None) == name
    assert choose_format("none", template) is None
