"""Tool calls of every served family, in pieces of any size: the same calls, the same text, nothing of a marker told."""

from __future__ import annotations

import json
import string
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft_services.gateway.text.assistant import THOUGHT_TAGS, AnswerReader, find_thought_tags, in_thoughts
from weft_services.gateway.text.parts import Part, PartKind, Parts, joined
from weft_services.gateway.text.tool_formats import FORMATS, ToolFormat

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

NOT_JSON = ["{1, 2}", 'b"x"', "1j", "...", "1e999", "{[]: 1}", "{(1, 2): 3}", "'\\ud83d'"]
HALF = '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>'
ADD_CALL = '{"name": "add", "arguments": {"a": 1}}'
SEEK_NONE = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_time<｜tool▁call▁end｜>"
XML = "<tool_call>\n<function=add>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"

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
    "glm": (
        "glm",
        'Let me see.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome "<b>\n</arg_value>\n'
        '<arg_key>n</arg_key>\n<arg_value>[1, {"a": null}]</arg_value>\n</tool_call>\n'
        "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key><arg_value>null</arg_value>"
        "</tool_call>",
        "Let me see.",
        [("get_weather", '{"city": "Rome \\"<b>\\n", "n": [1, {"a": null}]}'), ("add", '{"a": 1, "b": null}')],
    ),
    "granite-20b": (
        "granite-20b",
        f'Let me see.\n<function_call> {{"name": "get_weather", "arguments": {ROME}}}\n'
        f'<function_call> {{"name": "add", "arguments": {ADD}}}',
        "Let me see.",
        BOTH,
    ),
    "internlm2": (
        "internlm2",
        f'Let me see.<|action_start|><|plugin|>\n{{"name": "get_weather", "parameters": {ROME}}}<|action_end|>',
        "Let me see.",
        [BOTH[0]],
    ),
    "gemma4": (
        "gemma4",
        'Let me see.\n<|tool_call>call:get_weather{city:<|"|>Rome "<b>,\n}<|"|>,n:[1,{a:null,<|"|>b:<|"|>:[true]},[]]}'
        "<tool_call|><|tool_call>call:add{a:1,b:None}<tool_call|>",
        "Let me see.",
        [
            ("get_weather", '{"city": "Rome \\"<b>,\\n}", "n": [1, {"a": null, "b:": [true]}, []]}'),
            ("add", '{"a": 1, "b": null}'),
        ],
    ),
    "gemma4, no arguments": ("gemma4", "<|tool_call>call:now{}<tool_call|>", "", [("now", "{}")]),
    "gemma4, ended within": (
        "gemma4",
        '<|tool_call>call:add{a:[1,{b:<|"|>x',
        "",
        [("add", '{"a": [1, {"b": "x"}]}')],
    ),
    "gemma4, bare words": (
        "gemma4",
        "<|tool_call>call:add{a: some words , b:-2.5e3, c}<tool_call|>",
        "",
        [("add", '{"a": "some words", "b": -2.5e3}')],
    ),
    "gemma4, unclosed": ("gemma4", "<|tool_call>call:add{a:[1<tool_call|>", "", [("add", '{"a": [1]}')]),
    "gemma4, no call": ("gemma4", "a <|tool_call>b <|tool_call>call:c d", "a <|tool_call>b <|tool_call>call:c d", []),
    "function-gemma": (
        "function-gemma",
        "<start_function_call>call:get_weather{city:<escape>Rome<escape>}<end_function_call>",
        "",
        [("get_weather", '{"city": "Rome"}')],
    ),
    "apertus": (
        "apertus",
        f'Let me see.<|tools_prefix|>[{{"get_weather": {ROME}}}, {{"add": {ADD}}}]<|tools_suffix|>',
        "Let me see.",
        BOTH,
    ),
    "apertus, no call": ("apertus", "<|tools_prefix|>[1]", "<|tools_prefix|>[1]", []),
    "apertus, no name": ("apertus", '<|tools_prefix|>[{"": {}}]', '<|tools_prefix|>[{"": {}}]', []),
    "solar": (
        "solar",
        f"Let me see.<|tool_calls|><|tool_call:begin|>a1<|tool_call:name|>get_weather<|tool_call:args|>{ROME}"
        f"<|tool_call:end|><|tool_call:begin|>a2<|tool_call:name|>add<|tool_call:args|>{ADD}<|tool_call:end|><|calls|>",
        "Let me see.",
        BOTH,
    ),
    "minimax-m1": (
        "minimax-m1",
        f'Let me see.\n<tool_calls>\n{{"name": "get_weather", "arguments": {ROME}}}\n'
        f'{{"name": "add", "arguments": {ADD}}}\n</tool_calls>',
        "Let me see.",
        BOTH,
    ),
    "granite-3": (
        "granite-3",
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {ROME}}}, {{"name": "add", "arguments": {ADD}}}]',
        "",
        BOTH,
    ),
    "gigachat": (
        "gigachat",
        f'Let me see.<|function_call|>{{"name": "get_weather", "arguments": {ROME}}}'
        f'<|function_call|>{{"name": "add", "arguments": {ADD}}}',
        "Let me see.",
        BOTH,
    ),
    "minicpm5": (
        "minicpm5",
        'Let me see.\n<function name="get_weather"><param name="city">Rome</param></function>\n'
        '<function name="add"><param name="a">1</param></function>',
        "Let me see.",
        [("get_weather", '{"city": "Rome"}'), ("add", '{"a": 1}')],
    ),
    "minicpm5, quoted": (
        "minicpm5",
        '<function name="get_weather"><param name="city"><![CDATA[ a\n</param> <b> "c"]]></param>'
        '<param name="n"><![CDATA[x]]></param></function>',
        "",
        [("get_weather", '{"city": " a\\n</param> <b> \\"c\\"", "n": "x"}')],
    ),
    "olmo3": (
        "olmo3",
        "Let me see.\n<function_calls>\nget_weather(city='Rome', n=[1, {\"a\": null}])\nadd(a=1, b=null)\n"
        "</function_calls>",
        "Let me see.",
        [("get_weather", '{"city": "Rome", "n": [1, {"a": null}]}'), ("add", '{"a": 1, "b": null}')],
    ),
    "olmo3, unknown": (
        "olmo3",
        "<function_calls>\nother(a=1)\n</function_calls>",
        "<function_calls>\nother(a=1)\n</function_calls>",
        [],
    ),
    "lfm2, fenced": (
        "lfm2",
        "<|tool_call_start|>\n```python\nadd(a=1)\n```\n<|tool_call_end|>",
        "",
        [("add", '{"a": 1}')],
    ),
    "harmony": (
        "harmony",
        f" to=functions.get_weather<|channel|>commentary json<|message|>{ROME}<|call|>"
        f"<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{ADD}<|call|>",
        "",
        BOTH,
    ),
    "harmony, no arguments": (
        "harmony",
        " to=functions.add<|channel|>commentary<|message|><|call|>",
        "",
        [("add", "{}")],
    ),
    "harmony, ended within": (
        "harmony",
        '<|channel|>commentary to=add<|message|>{"a": 1',
        "",
        [("add", '{"a": 1}')],
    ),
    "harmony, no object": (
        "harmony",
        "<|channel|>commentary to=functions.add code<|message|>1 + 1<|call|>",
        "1 + 1",
        [],
    ),
    "harmony, no header": ("harmony", "So to=functions.add", "So to=functions.add", []),
    "glm, no arguments": ("glm", "<tool_call>now\n</tool_call>", "", [("now", "{}")]),
    "glm, no call": (
        "glm",
        "a `<tool_call>` opens, `</tool_call>` closes",
        "a `<tool_call>` opens, `</tool_call>` closes",
        [],
    ),
    "seed": (
        "seed",
        "So.\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>Rome\n</parameter>\n<parameter=n>[1]</parameter>\n"
        "</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=add>\n</function>\n</seed:tool_call>",
        "So.",
        [("get_weather", '{"city": "Rome\\n", "n": [1]}'), ("add", "{}")],
    ),
    "hy3": (
        "hy3",
        "So.<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
        "</tool_call>\n<tool_call>add<tool_sep></tool_call>\n</tool_calls>",
        "So.",
        [("get_weather", '{"city": "Rome"}'), ("add", "{}")],
    ),
    "minimax": (
        "minimax-m2",
        'So.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Rome <invoke></parameter>\n'
        '<parameter name="n">[1]</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        "So.",
        [("get_weather", '{"city": "Rome <invoke>", "n": [1]}'), ("now", "{}")],
    ),
    "minimax, no section": (
        "minimax-m2",
        '<invoke name="add"><parameter name="a">1</parameter></invoke>',
        "",
        [("add", '{"a": 1}')],
    ),
    "minimax, no call": (
        "minimax-m2",
        'write <minimax:tool_call> and <invoke name="x">',
        'write <minimax:tool_call> and <invoke name="x">',
        [],
    ),
    "deepseek v3.2": (
        "deepseek-v3.2",
        'So.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">7</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="m" string="false">7</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="n">[1]</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        "So.",
        [("get_weather", '{"city": "7", "m": 7, "n": [1]}')],
    ),
    "deepseek v4": (
        "deepseek-v3.2",
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        "",
        [("now", "{}")],
    ),
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
    "nemotron": (
        "nemotron-v2",
        f'So.\n\n<TOOLCALL>[{{"name": "get_weather", "arguments": {ROME}}}, '
        f'{{"name": "add", "arguments": {ADD}}}]</TOOLCALL>',
        "So.",
        BOTH,
    ),
    "nemotron, no call": ("nemotron-v2", "a <TOOLCALL> b <TOOLCALL>[1]", "a <TOOLCALL> b <TOOLCALL>[1]", []),
    "command r": (
        "command-r",
        f'Hm.<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {ROME}}},\n'
        f'    {{"tool_call_id": "1", "tool_name": "add", "parameters": {ADD}}}\n]<|END_ACTION|>',
        "Hm.",
        BOTH,
    ),
    "functionary": (
        "functionary",
        f"So.\n<function=get_weather>{ROME}</function><function=add>{ADD}</function>",
        "So.",
        BOTH,
    ),
    "functionary, no call": ("functionary", "a <function=NAME> and so on", "a <function=NAME> and so on", []),
    "lfm2": (
        "lfm2",
        "So. <|tool_call_start|>[add(a=1, b=[True, None, 'x)]']), get_weather()]<|tool_call_end|>",
        "So.",
        [("add", '{"a": 1, "b": [true, null, "x)]"]}'), ("get_weather", "{}")],
    ),
    "lfm2, no call": (
        "lfm2",
        "a <|tool_call_start|>[open('x')]<|tool_call_end|> b",
        "a <|tool_call_start|>[open('x')]<|tool_call_end|> b",
        [],
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
NEARLY_CALLS: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    *(("llama", f"[add(a={value})]", f"[add(a={value})]", list[tuple[str, str]]()) for value in NOT_JSON),
    ("llama", f"<|python_start|>{ADD_CALL}<|python_end|>", "", [("add", '{"a": 1}')]),
    ("mistral", f"[TOOL_CALLS]{ADD_CALL}", "", [("add", '{"a": 1}')]),
    ("mistral", '[TOOL_CALLS]{"city": "Rome"}', '[TOOL_CALLS]{"city": "Rome"}', []),
    ("mistral-args", '[TOOL_CALLS][ARGS]{"a": 1}', '[TOOL_CALLS][ARGS]{"a": 1}', []),
    ("kimi", "<|tool_call_begin|>{}", "<|tool_call_begin|>{}", []),
    ("deepseek-v3.1", SEEK_V31.format("", "{}"), "{}", []),
    ("deepseek-v3.1", f"{SEEK_NONE}{SEEK_V31.format('add', '{}')}", "get_time", [("add", "{}")]),
    ("hermes", HALF, HALF, []),
    ("hermes", f"{HALF} So?", f"{HALF} So?", []),
    ("hermes", f"<tool_call>[1]</tool_call>{HALF}", f"<tool_call>[1]</tool_call>{HALF}", []),
    ("hermes", 2 * f'<tool_call>{{"id": null, {ADD_CALL[1:]}</tool_call>', "", 2 * [("add", '{"a": 1}')]),
    ("hermes", 2 * '<tool_call>{"name": "add", "id": null}</tool_call>', "", 2 * [("add", "{}")]),
    ("qwen-xml", "<function=add><parameter=a>NaN</parameter></function>", "", [("add", '{"a": "NaN"}')]),
    ("qwen-xml", XML.format("{'b': [True, None]}"), "", [("add", '{"a": {"b": [true, null]}}')]),
    ("qwen-xml", XML.format("{'b': {1, 2}}"), "", [("add", """{"a": "{'b': {1, 2}}"}""")]),
    ("qwen-xml", XML.format("True"), "", [("add", '{"a": true}')]),
    ("hermes", f'<tool_call>{ADD_CALL[:-1]}, "parameters": {{"b": 2}}}}</tool_call>', "", [("add", '{"a": 1}')]),
    (
        "kimi",
        '<|tool_call_begin|>functions.get_weather<|tool_call_argument_begin|>{"city": "Oslo"}<|tool_call_end|>',
        "",
        [("get_weather", '{"city": "Oslo"}')],
    ),
    (
        "deepseek-v3.1",
        f"{SEEK_V31.format('ping', '')}{SEEK_V31.format('add', '{}')}",
        "",
        [("ping", "{}"), ("add", "{}")],
    ),
]


def read(
    tool_format: ToolFormat,
    pieces: list[str],
    thinks: bool = False,
    is_thinking: bool = False,
    is_cut: bool = False,
    schemas: Any = SCHEMAS,
) -> list[Part]:
    parser, parts_of, form = tool_format.parser(schemas), Parts(tool_format.new_id), tool_format
    reader = AnswerReader(parser, parts_of, thinks, is_thinking, form.ends_thoughts, call_openings=form.call_openings)
    parts = [part for piece in pieces for part in reader.push(piece)]
    return parts + reader.finish(is_cut)


def said(parts: list[Part], kind: PartKind) -> str:
    return "".join(part.text for part in parts if part.kind is kind)


def calls(parts: list[Part]) -> list[tuple[str, str]]:
    begun = [part for part in parts if part.kind is PartKind.CALL]
    of_calls = [
        (part.call, part.kind is not PartKind.CALL)
        for part in parts
        if part.kind in (PartKind.CALL, PartKind.ARGUMENTS)
    ]
    assert of_calls == sorted(of_calls)  # a call begins before its arguments, and calls do not mix
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


@pytest.mark.parametrize(
    "answer", [*ANSWERS.values(), *NEARLY_CALLS], ids=[*ANSWERS, *map(str, range(len(NEARLY_CALLS)))]
)
def test_calls_and_text_are_found_however_the_answer_is_cut(
    answer: tuple[str, str, str, list[tuple[str, str]]],
) -> None:
    name, written, text, expected = answer
    for pieces in cuts(written):
        parts = read(FORMATS[name], pieces)
        assert said(parts, PartKind.TEXT) == text
        assert calls(parts) == expected
        assert all(part.text for part in parts)


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
        ("<think>a <think>b</think>c", False, "a <think>b", "c"),
        ("<think>a</think>b </think> c", False, "a", "b </think> c"),
        ("<think>a</think>b <think>c</think> d", False, "a", "b <think>c</think> d"),
        ("<think>`<tool_call>` {</think>b", False, "`<tool_call>` {", "b"),
        ("a <think>b</think>", False, "", "a <think>b</think>"),
    ],
)
def test_thoughts_are_told_from_text(written: str, is_thinking: bool, reasoning: str, text: str) -> None:
    for pieces in cuts(written):
        parts = read(FORMATS["hermes"], pieces, thinks=True, is_thinking=is_thinking)
        assert (said(parts, PartKind.REASONING).strip(), said(parts, PartKind.TEXT)) == (reasoning, text)


@pytest.mark.parametrize("tags", THOUGHT_TAGS, ids=str)
@pytest.mark.parametrize("is_thinking", [False, True])
def test_thoughts_have_the_tags_of_the_family(tags: tuple[str, str], is_thinking: bool) -> None:
    (opening, closing), tool_format = tags, FORMATS["mistral-args"]
    written = f'{"" if is_thinking else opening}I need it.{closing}[TOOL_CALLS]add[ARGS]{{"a": 1}}'
    assert find_thought_tags(f"{{{{ '{opening}' ~ thoughts ~ '{closing}' }}}}") == tags
    assert in_thoughts(f"assistant\n{opening}\n", tags)
    assert in_thoughts("", tags, f"{opening}Hm")
    assert not in_thoughts("", tags, f"{opening}Hm{closing}")
    for pieces in cuts(written):
        parser = tool_format.parser(SCHEMAS)
        reader = AnswerReader(parser, Parts(tool_format.new_id), True, is_thinking, thought_tags=tags)
        parts = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
        assert (said(parts, PartKind.REASONING), said(parts, PartKind.TEXT)) == ("I need it.", "")
        assert calls(parts) == [("add", '{"a": 1}')]


def test_a_call_after_thoughts_is_found() -> None:
    parts = read(FORMATS["hermes"], list(f"<think>hm</think>\n{ANSWERS['hermes'][1]}"), thinks=True)
    assert said(parts, PartKind.REASONING) == "hm"
    assert calls(parts) == BOTH


DRAFT = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.mark.parametrize(
    ("name", "written", "reasoning", "text", "expected"),
    [
        ("hermes", f"I need it.\n{DRAFT}\n", "I need it.", "", [("add", '{"a": 1}')]),
        ("hermes", f"I need both.\n{DRAFT}\n{DRAFT}", "I need both.", "", 2 * [("add", '{"a": 1}')]),
        ("hermes", f"I could {DRAFT} or not", f"I could {DRAFT} or not", "", []),
        ("hermes", f"Maybe {DRAFT}</think>No.", f"Maybe {DRAFT}", "No.", []),
        ("hermes", f"Hm {DRAFT}</think>{DRAFT}", f"Hm {DRAFT}", "", [("add", '{"a": 1}')]),
        ("hermes", "a `<tool_call>` opens", "a `<tool_call>` opens", "", []),
        ("qwen-xml", f"Hm.\n{XML.format(7)}", "Hm.", "", [("add", '{"a": 7}')]),
        (
            "glm",
            "Hm.\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>7</arg_value>\n</tool_call>",
            "Hm.",
            "",
            [("add", '{"a": 7}')],
        ),
        ("mistral-args", 'Hm.[TOOL_CALLS]add[ARGS]{"a": 7}', "Hm.", "", [("add", '{"a": 7}')]),
        ("deepseek-v3.1", f"Hm.{SEEK.format(SEEK_V31.format('add', '{}'))}", "Hm.", "", [("add", "{}")]),
    ],
)
def test_a_call_that_ends_unfinished_thoughts_is_a_call(
    name: str, written: str, reasoning: str, text: str, expected: list[tuple[str, str]]
) -> None:
    for is_thinking, pieces in ((how, each) for how in (True, False) for each in cuts(written)):
        parts = read(FORMATS[name], pieces if is_thinking else ["<think>", *pieces], True, is_thinking)
        assert (said(parts, PartKind.REASONING), said(parts, PartKind.TEXT)) == (reasoning, text)
        assert calls(parts) == expected


def test_a_call_in_thoughts_that_are_cut_off_is_a_draft() -> None:
    parts = read(FORMATS["hermes"], list(f"I need it. {DRAFT[:-4]}"), thinks=True, is_thinking=True, is_cut=True)
    assert not calls(parts)
    assert DRAFT[: -len("</tool_call>")] in said(parts, PartKind.REASONING)


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


PIECES = [
    *(marker for each in FORMATS.values() for marker in each.markers),
    *("<function=", "<function=add>", "<parameter=", "<parameter=a>", "</parameter>", "\n</parameter>", "</function>"),
    *("<think>", "</think>", "[add(", "[add(a=1)]", "functions.add:0", "```json", "```", "add", "NaN", "null", "1"),
    *('"name"', '"arguments"', '"parameters"', '"id"', '"add"', "{", "}", "[", "]", "(", ")", ":", ",", ";", '"', "\\"),
    *(
        ADD_CALL,
        ADD_CALL[:-2],
        '{"arguments": {}, "name": "add"}',
        '{"name": "no", "arguments": {}}',
        "ud83d",
        "🙂",
        "<",
        " ",
        "\n",
    ),
    " " * 700,
]


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
def test_whatever_is_written_is_read_the_same_however_it_is_cut(name: str, data: st.DataObject) -> None:
    pieces = st.sampled_from([*PIECES, *FORMATS[name].markers * 8])
    written = "".join(data.draw(st.lists(pieces, max_size=16)))
    thinks, is_thinking = data.draw(st.sampled_from([(False, False), (True, False), (True, True)]))
    is_cut = data.draw(st.booleans())
    whole, *others = [
        [
            (part.kind.name, part.call, part.text)
            for part in joined(read(FORMATS[name], each, thinks, is_thinking, is_cut))
        ]
        for each in cuts(written)
    ]
    assert all(other == whole for other in others)
    open_call = max((call for kind, call, _ in whole if kind == "CALL"), default=0) if is_cut else None
    for kind, call, text in whole:
        if kind == "ARGUMENTS" and call != open_call:
            assert isinstance(json.loads(text), dict)
    json.dumps(whole, ensure_ascii=False).encode()


@pytest.mark.parametrize("answer", [each for each in ANSWERS.values() if each[3]])
def test_cut_answer_has_no_markup_wherever_it_is_cut(answer: tuple[str, str, str, list[tuple[str, str]]]) -> None:
    form, written, text, expected = answer
    for end in range(len(written)):
        for pieces in (list(written[:end]), [written[:end]]):
            parts = read(FORMATS[form], pieces, is_cut=True)
            assert said(parts, PartKind.TEXT) == text[:end].rstrip()
            for (found, arguments), (called, whole) in zip(calls(parts), expected, strict=False):
                assert found == called
                assert whole.startswith(arguments)


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


def test_kimi_goes_from_thoughts_to_a_call_without_a_word() -> None:
    call = "<|tool_call_begin|>functions.ls:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    for written in (f"<|tool_calls_section_begin|>{call}<|tool_calls_section_end|>", call):
        for pieces in cuts(f"I will list it.{written}"):
            parts = read(FORMATS["kimi"], pieces, thinks=True, is_thinking=True)
            assert (said(parts, PartKind.REASONING), calls(parts)) == ("I will list it.", [("ls", "{}")])


def test_names_that_are_no_pythons_are_called_in_python() -> None:
    schemas: Any = {"go-there.v2": {}, "now": {}}
    for pieces in cuts("[go-there.v2(x=1), now()]"):
        assert calls(read(FORMATS["llama"], pieces, schemas=schemas)) == [("go-there.v2", '{"x": 1}'), ("now", "{}")]
    parts = read(FORMATS["llama"], ["[go-there.v2(1)]"], schemas=schemas)
    assert (said(parts, PartKind.TEXT), calls(parts)) == ("[go-there.v2(1)]", [])
