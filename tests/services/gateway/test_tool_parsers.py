"""Tool calls of every served family, in pieces of any size: the same calls, the same text, nothing of a marker told."""

from __future__ import annotations

import json
import string
import time
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.services.gateway.tool_answers import (
    ADD_CALL,
    ANSWERS,
    BOTH,
    KIMI,
    NEARLY_CALLS,
    SCHEMAS,
    SEEK,
    SEEK_V31,
    XML,
)
from weft_services.gateway.text.assistant import THOUGHT_TAGS, AnswerReader, find_thought_tags, in_thoughts
from weft_services.gateway.text.parts import Part, PartKind, Parts, joined
from weft_services.gateway.text.tool_formats import FORMATS, ToolFormat


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
    """It takes 0.1 s of a processor; the bound fails what grows faster than the text, on a slow machine too."""
    began = time.process_time()
    for written in ("<tool_call>" * 3000, "{" * 20_000, "[" * 20_000, '<tool_call>{"name": "' + "\\" * 20_000):
        for name in ("hermes", "llama", "mistral", "qwen-xml"):
            parts = read(FORMATS[name], [written[at : at + 50] for at in range(0, len(written), 50)])
            assert not calls(parts)
    assert time.process_time() - began < 10


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
