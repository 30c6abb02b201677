"""Calls whose arguments have tags: values that contain tags, and types that the tool's schema says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.services.gateway.test_tool_parsers import calls, cuts, read, said
from weft_services.gateway.text.parts import PartKind
from weft_services.gateway.text.tag_calls import is_text
from weft_services.gateway.text.tool_formats import FORMATS

PROPERTIES: Any = {"path": {"type": "string"}, "text": {"type": "string"}, "lines": {"type": "array"}}
NESTED: dict[str, dict[str, Any]] = {"write": {"properties": PROPERTIES}, "edit": {"properties": PROPERTIES}, "add": {}}
HTML = '<html>\n<body class="a">&amp; <p>x</p>\n</body>\n</html>'
INNER = "<parameter=x>\n1\n</parameter>"
EXAMPLE = f"<function=f>\n{INNER}\n</function>"


def in_tags(name: str, form: str = "qwen-xml", **values: str) -> str:
    tags = FORMATS[form].tags
    assert tags is not None
    begin, end = tags.sections[0] if tags.sections else ("", "")
    pad = tags.padding
    inner = "".join(
        f"{tags.key[0]}{key}{tags.key[1]}{tags.value[0]}{pad}{value}{pad}{tags.value[1]}\n"
        for key, value in values.items()
    )
    opening = f"{begin}{tags.call[0]}{tags.name[0]}{name}{tags.name[1]}"
    return f"{opening}\n{inner}{tags.end}{tags.call[1]}{end}"


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
    ("form", "name", "value"),
    [("qwen-xml", name, each) for name in ("write", "add", "new") for each in VALUES]
    + [("qwen-xml", "write", each) for each in WITH_LINES]
    + [(form.name, "write", each) for form in FORMATS.values() if form.tags for each in VALUES],
)
def test_value_in_tags_has_tags_within(form: str, name: str, value: str) -> None:
    for pieces in cuts(in_tags(name, form, text=value, path="a.py")):
        parts = read(FORMATS[form], pieces, schemas=NESTED)
        ((called, arguments),) = calls(parts)
        assert (called, said(parts, PartKind.TEXT)) == (name, "")
        assert json.loads(arguments) == {"text": value, "path": "a.py"}


def test_value_that_comes_last_has_tags_within() -> None:
    for value in (HTML, INNER, EXAMPLE, "</parameter> x", f"{EXAMPLE}\n"):
        for pieces in cuts(f"{in_tags('write', text=value)}\n{in_tags('add', a='1')}"):
            found = [
                (name, json.loads(arguments))
                for name, arguments in calls(read(FORMATS["qwen-xml"], pieces, schemas=NESTED))
            ]
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
    for pieces in cuts(in_tags("write", lines=value)):
        ((_, arguments),) = calls(read(FORMATS["qwen-xml"], pieces, schemas=NESTED))
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
        parts = read(FORMATS["qwen-xml"], pieces, schemas=NESTED)
        assert (calls(parts), said(parts, PartKind.TEXT)) == ([], text)


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
    for pieces in cuts(f"<tool_call>\n<function=edit>\n{written}{closing}Done."):
        parts = read(FORMATS["qwen-xml"], pieces, schemas=NESTED)
        ((_, found),) = calls(parts)
        assert (json.loads(found), said(parts, PartKind.TEXT)) == (arguments, "Done.")


@pytest.mark.parametrize(
    ("schema", "written", "arguments"),
    [
        ({"type": ["string", "null"]}, "null", "null"),
        ({"type": ["string", "null"]}, "None", "null"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", "null"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, 'nul "l"', r'"nul \"l\""'),
        ({"enum": ["a", None]}, "null", "null"),
        ({"type": "string", "nullable": True}, "null", "null"),
        ({"type": "string"}, "null", '"null"'),
        ({"type": "integer"}, "null", "null"),
        ({"const": None}, "null", "null"),
        ({"const": 2}, "2", "2"),
        ({"const": "2"}, "2", '"2"'),
        ({"anyOf": [{"enum": ["a"]}, {"type": "null"}]}, "null", "null"),
        ({"anyOf": [{"type": "string"}, {"enum": [2]}]}, "2", '"2"'),
        ({"oneOf": [{"const": 1}, {"const": 2}]}, "2", "2"),
    ],
)
def test_values_are_what_the_schema_says(schema: Any, written: str, arguments: str) -> None:
    for pieces in cuts(in_tags("add", mode=written)):
        parts = read(FORMATS["qwen-xml"], pieces, schemas={"add": {"properties": {"mode": schema}}})
        assert calls(parts) == [("add", f'{{"mode": {arguments}}}')]


# as pydantic writes a class that has itself for a field
RECURSIVE: Any = {
    "$ref": "#/$defs/Step",
    "$defs": {
        "Step": {
            "type": "object",
            "properties": {
                "size": {"type": "integer"},
                "way": {"$ref": "#/$defs/Way"},
                "next": {"anyOf": [{"$ref": "#/$defs/Step"}, {"type": "null"}]},
            },
            "required": ["size"],
        },
        "Way": {"type": "string", "enum": ["1", "true"]},
    },
}


@pytest.mark.parametrize(
    ("schema", "arguments"),
    [(RECURSIVE, '{"size": 7, "way": "1"}'), ({"$ref": "#/$defs/no"}, '{"size": "7", "way": "1"}')],
)
def test_a_schema_that_refers_to_itself_says_what_its_values_are(schema: Any, arguments: str) -> None:
    parts = read(FORMATS["qwen-xml"], [in_tags("step", size="7", way="1")], schemas={"step": schema})
    assert calls(parts) == [("step", arguments)]


def test_what_every_part_of_a_schema_says_is_said() -> None:
    assert not is_text({"allOf": [{"$ref": "#/$defs/Address"}], "description": "where"})
    assert not is_text({"allOf": [{"type": "integer"}]})
    assert is_text({"allOf": [{"type": "string"}, {"description": "a name"}]})


@pytest.mark.parametrize("kind", [5, True, 0.5, {"type": "string"}, []])
def test_a_schema_that_is_none_does_not_cost_the_answer(kind: Any) -> None:
    written = "<function=add><parameter=a>1</parameter></function>"
    parts = read(FORMATS["qwen-xml"], [written], schemas={"add": {"properties": {"a": {"type": kind}}}})
    assert calls(parts) == [("add", '{"a": 1}')]
