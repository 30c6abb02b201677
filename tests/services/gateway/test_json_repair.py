"""Arguments of calls are JSON of an object, whatever models write in its place and however the answer is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.services.gateway.test_tool_parsers import calls, cuts, read, said
from weft_services.gateway.text.json_repair import JsonRepairer, repaired_object
from weft_services.gateway.text.parts import PartKind
from weft_services.gateway.text.tool_formats import FORMATS

SEEK = "<｜tool▁call▁begin｜>{}<｜tool▁call▁end｜>"
FRAMES = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": %s}\n</tool_call>',
    "llama": '{"name": "add", "parameters": %s}',
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": %s}]',
    "mistral-args": "[TOOL_CALLS]add[ARGS]%s",
    "deepseek-v3": SEEK.format("function<｜tool▁sep｜>add\n```json\n%s\n```"),
    "deepseek-v3.1": SEEK.format("add<｜tool▁sep｜>%s"),
    "nemotron-v2": '<TOOLCALL>[{"name": "add", "arguments": %s}]</TOOLCALL>',
    "command-r": '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "add", "parameters": %s}]<|END_ACTION|>',
    "functionary": "<function=add>%s</function>",
    "kimi": "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>%s<|tool_call_end|>",
}
# what models write, and what it means
MENDED: list[tuple[str, Any]] = [
    ('{"a": "line 1\nline 2"}', {"a": "line 1\nline 2"}),
    ('{"a": "\t\r\n\x0b\x00\x1f"}', {"a": "\t\r\n\x0b\x00\x1f"}),
    ('{"a": "\x7f\u2028\u2029\x85"}', {"a": "\x7f\u2028\u2029\x85"}),
    ('{"a": "\\"q\\" \n \\\\\n", "b": 1}', {"a": '"q" \n \\\n', "b": 1}),
    ('{"a": "ls \\\n-l"}', {"a": "ls \\\n-l"}),
    ('{"a": "C:\\Windows\\system32"}', {"a": "C:\\Windows\\system32"}),
    ('{"a": "C:\\users\\x41"}', {"a": "C:\\users\\x41"}),
    ('{"a": "\\d+\\.\\w*\\s"}', {"a": "\\d+\\.\\w*\\s"}),
    ('{"a": "it\\\'s"}', {"a": "it's"}),
    ('{"a": "\\u00e9\\u12g4\\u"}', {"a": "é\\u12g4\\u"}),
    ('{"a": "\\ud83d\\ude42 \\ud83d \\ude42 \\ud83d\\ud83d\\ude42 \\ud83d\\n"}', {"a": "🙂 � � �🙂 �\n"}),
    ('{"a": NaN, "b": -Infinity, "c": Infinity, "d": 1e999}', {"a": None, "b": None, "c": None, "d": None}),
    ("{'a': True, 'b': [None, False], 'c': 'say \"x\"'}", {"a": True, "b": [None, False], "c": 'say "x"'}),
    ('{"a": [1, 2,], "b": {"c": 3,},\n}', {"a": [1, 2], "b": {"c": 3}}),
    ('{"a": 007, "b": +1, "c": .5, "d": 1., "e": -01.50}', {"a": 7, "b": 1, "c": 0.5, "d": 1.0, "e": -1.5}),
    ("{a: 1, b: Rome}", {"a": 1, "b": "Rome"}),
    ('{"a": 1 "b": 2}', {"a": 1, "b": 2}),
    ('{"a": 1, "a": 2}', {"a": 2}),
    ('{"a": [1, 2, "b": 3}', {"a": [1, 2, "b", 3]}),
    ('{"a", "b":, "c": }', {"a": None, "b": None, "c": None}),
    ('{"a": "</tool_call><tool_call>[TOOL_CALLS]<|tool_call_end|><｜tool▁call▁end｜>``` {}"}', None),
    ("{}", {}),
    ("{ \n}", {}),
]


@pytest.mark.parametrize("name", FRAMES)
@pytest.mark.parametrize(("raw", "meant"), MENDED)
def test_arguments_parse_when_models_write_nearly_json(name: str, raw: str, meant: Any) -> None:
    for pieces in cuts(FRAMES[name] % raw):
        parts = read(FORMATS[name], pieces)
        ((called, arguments),) = calls(parts)
        assert (called, said(parts, PartKind.TEXT)) == ("add", "")
        assert json.loads(arguments) == (json.loads(raw) if meant is None else meant)


@pytest.mark.parametrize("name", FRAMES)
@pytest.mark.parametrize(
    ("raw", "meant"),
    [
        ("null", {}),
        ('""', {}),
        ("[]", {}),
        ('"{\\"a\\": \\"x\\\\ny\\"}"', {"a": "x\ny"}),
        ("\"{'a': 1,}\"", {"a": 1}),
        ("[1, 2]", None),
        ('"text"', None),
        ('"[1]"', None),
        ("7", None),
    ],
)
def test_arguments_are_an_object_or_the_call_is_text(name: str, raw: str, meant: Any) -> None:
    for pieces in cuts(FRAMES[name] % raw):
        parts = read(FORMATS[name], pieces)
        assert [json.loads(arguments) for _, arguments in calls(parts)] == ([] if meant is None else [meant])
        assert (raw in said(parts, PartKind.TEXT)) is (meant is None)


@pytest.mark.parametrize("name", FRAMES)
def test_bracket_too_many_behind_a_call_is_no_text(name: str) -> None:
    for pieces in cuts(FRAMES[name] % '{"a": 1}}}'):
        parts = read(FORMATS[name], pieces)
        assert (calls(parts), said(parts, PartKind.TEXT)) == ([("add", '{"a": 1}')], "")


def test_closing_tag_is_no_text_when_words_stand_before_it() -> None:
    parts = read(FORMATS["hermes"], [FRAMES["hermes"].replace("\n</", " Done. </") % "{}" + " </tool_call>"])
    assert (calls(parts), said(parts, PartKind.TEXT)) == ([("add", "{}")], " Done.  </tool_call>")


@pytest.mark.parametrize("name", ["hermes", "deepseek-v3", "deepseek-v3.1", "kimi"])
def test_markup_ends_arguments_that_are_not_closed(name: str) -> None:
    for pieces in cuts((FRAMES[name] % '{"a": [1, {"b": 2').replace("2}", "2")):
        parts = read(FORMATS[name], pieces)
        assert calls(parts) == [("add", '{"a": [1, {"b": 2' + ("\n}]}" if "\n" in FRAMES[name] else "}]}"))]
        assert said(parts, PartKind.TEXT) == ""


def mended(pieces: list[str]) -> str:
    mender = JsonRepairer()
    return "".join([*(mender.read(piece)[0] for piece in pieces), "" if mender.is_done else mender.close()])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(value=st.dictionaries(st.text(), JSON), is_ascii=st.booleans(), indent=st.sampled_from([None, 0, 2]))
def test_json_passes_unchanged(value: Any, is_ascii: bool, indent: int | None) -> None:
    written = json.dumps(value, ensure_ascii=is_ascii, indent=indent)
    assert mended([written]) == mended(list(written)) == repaired_object(written) == written


@given(rest=st.text("{}[]\"':,\\ud83dDC00 \nx1.+-eNn<`\x00a"), size=st.integers(1, 5))
def test_any_text_becomes_an_object_however_it_is_cut(rest: str, size: int) -> None:
    written = "{" + rest
    found = mended([written])
    assert isinstance(json.loads(found), dict)
    found.encode()
    assert mended([written[at : at + size] for at in range(0, len(written), size)]) == found


@pytest.mark.parametrize("name", FRAMES)
def test_cut_arguments_are_a_prefix_of_the_whole(name: str) -> None:
    raw = '{"a": "x\n\\d\\ud83d\\ude42 \\ud83d.", \'b\': [True, 007,], "c": "\x01"}'
    written = FRAMES[name] % raw
    ((_, whole),) = calls(read(FORMATS[name], [written]))
    for end in range(len(written)):
        found = calls(read(FORMATS[name], list(written[:end]), is_cut=True))
        assert all(whole.startswith(arguments) for _, arguments in found)
        assert said(read(FORMATS[name], list(written[:end]), is_cut=True), PartKind.TEXT) == ""


@pytest.mark.parametrize("name", FRAMES)
def test_string_has_every_formats_marks_within(name: str) -> None:
    marks = [mark for form in FORMATS.values() for mark in (*form.markers, *form.opening, *form.closing)]
    meant = {"a": " ".join([*marks, "<think>", "</think>", "```", "}]\"'"]), "b": ["</tool_call>", "}"]}
    for pieces in cuts(FRAMES[name] % json.dumps(meant, ensure_ascii=False)):
        parts = read(FORMATS[name], pieces)
        ((_, arguments),) = calls(parts)
        assert (json.loads(arguments), said(parts, PartKind.TEXT)) == (meant, "")
