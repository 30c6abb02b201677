"""Tags within what they enclose: a value, a string or a text may speak of tags without ending."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.services.gateway.test_json_repair import FRAMES
from tests.services.gateway.test_tool_parsers import calls, cuts, said
from weft_services.gateway.text.assistant import AnswerReader
from weft_services.gateway.text.parts import Part, PartKind, Parts
from weft_services.gateway.text.tool_formats import FORMATS

PROPERTIES: Any = {"path": {"type": "string"}, "text": {"type": "string"}, "lines": {"type": "array"}}
SCHEMAS: dict[str, dict[str, Any]] = {"write": {"properties": PROPERTIES}, "add": {}}
HTML = '<html>\n<body class="a">&amp; <p>x</p>\n</body>\n</html>'
INNER = "<parameter=x>\n1\n</parameter>"
EXAMPLE = f"<function=f>\n{INNER}\n</function>"


def read(form: str, pieces: list[str], thinks: bool = False) -> list[Part]:
    reader = AnswerReader(FORMATS[form].parser(SCHEMAS), Parts(FORMATS[form].new_id), thinks)
    return [part for piece in pieces for part in reader.push(piece)] + reader.finish()


def written(name: str, **values: str) -> str:
    tags = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{tags}</function>\n</tool_call>"


VALUES = [
    HTML,
    "a </parameter> b",
    "a\n</parameter>\nb",
    "a </function> b\n</function>\nc",
    "say <function=f> or <tool_call> and </tool_call>.",
    f"see {INNER} and {INNER}\nso",
    "",
    "\n\n",
]
# without a schema a parameter's tag on a line of its own begins one
WITH_LINES = [INNER, f"{INNER}\n{INNER}", EXAMPLE, f"{EXAMPLE}\n{EXAMPLE}", "<parameter=x> opens"]


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, each) for name in ("write", "add", "new") for each in VALUES] + [("write", each) for each in WITH_LINES],
)
def test_value_in_tags_has_tags_within(name: str, value: str) -> None:
    for pieces in cuts(written(name, text=value, path="a.py")):
        parts = read("qwen-xml", pieces)
        ((called, arguments),) = calls(parts)
        assert (called, said(parts, PartKind.TEXT)) == (name, "")
        assert json.loads(arguments) == {"text": value, "path": "a.py"}


def test_value_that_comes_last_has_tags_within() -> None:
    for value in (HTML, INNER, EXAMPLE, "</parameter> x", f"{EXAMPLE}\n"):
        for pieces in cuts(f"{written('write', text=value)}\n{written('add', a='1')}"):
            found = [(name, json.loads(arguments)) for name, arguments in calls(read("qwen-xml", pieces))]
            assert found == [("write", {"text": value}), ("add", {"a": "1"})]


@pytest.mark.parametrize(
    ("value", "meant"),
    [
        ('["a\nb", "c\td"]', ["a\nb", "c\td"]),
        ('["\\d", 1,]', ["\\d", 1]),
        ("['a', None]", ["a", None]),
        ('["</parameter>", "<parameter=x>"]', ["</parameter>", "<parameter=x>"]),
        ("[1, 2", "[1, 2"),
        ("", ""),
    ],
)
def test_value_that_is_nearly_json_is_mended(value: str, meant: Any) -> None:
    for pieces in cuts(written("write", lines=value)):
        ((_, arguments),) = calls(read("qwen-xml", pieces))
        assert json.loads(arguments) == {"lines": meant}


@pytest.mark.parametrize(
    "text",
    [
        "Write <function=NAME> and <parameter=KEY>.",
        "<function=NAME>\n<parameter=KEY>\nvalue\n</parameter>\n</function>",
        "`<tool_call>` opens, `</tool_call>` closes.",
        "<tool_call>\n<function=a b",
    ],
)
def test_text_that_speaks_of_tags_is_text(text: str) -> None:
    for pieces in cuts(text):
        parts = read("qwen-xml", pieces)
        assert (calls(parts), said(parts, PartKind.TEXT)) == ([], text)


@pytest.mark.parametrize("name", FRAMES)
def test_string_has_every_formats_marks_within(name: str) -> None:
    marks = [mark for form in FORMATS.values() for mark in (*form.markers, *form.opening, *form.closing)]
    meant = {"a": " ".join([*marks, "<think>", "</think>", "```", "}]\"'"]), "b": ["</tool_call>", "}"]}
    for pieces in cuts(FRAMES[name] % json.dumps(meant, ensure_ascii=False)):
        parts = read(name, pieces)
        ((_, arguments),) = calls(parts)
        assert (json.loads(arguments), said(parts, PartKind.TEXT)) == (meant, "")


@pytest.mark.parametrize(
    ("answer", "thoughts", "text"),
    [
        ("<think>a <think>b</think>c", "a <think>b", "c"),
        ("<think>a</think>b </think> c", "a", "b </think> c"),
        ("<think>a</think>b <think>c</think> d", "a", "b <think>c</think> d"),
        ("<think>`<tool_call>` {</think>b", "`<tool_call>` {", "b"),
        ("a <think>b</think>", "", "a <think>b</think>"),
    ],
)
def test_thoughts_are_the_first_pair_of_tags(answer: str, thoughts: str, text: str) -> None:
    for pieces in cuts(answer):
        parts = read("hermes", pieces, thinks=True)
        assert (said(parts, PartKind.REASONING), said(parts, PartKind.TEXT)) == (thoughts, text)
