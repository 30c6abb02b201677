"""AnswerFormat -> a grammar in llguidance's own form, as workers get it. Compiles nothing."""

from __future__ import annotations

import json
from typing import Any

import orjson
from llguidance.gbnf_to_lark import any_to_lark

from weft.errors import InvalidRequest
from weft.grammar import first_line
from weft_services.gateway.generation import AnswerFormat, FormatKind

# models left to themselves may pad JSON with white space without end
WHITE_SPACE = r"[ \t\n\r]{0,16}"
# any text
TEXT = r"/(.|\n)*/"
# of a schema: where keys are names of the client's own, and where what follows is no schema
NAMES = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
VALUES = frozenset(("enum", "const", "default", "examples"))

Part = dict[str, Any]


def join(parts: list[Part]) -> str:
    """Parts refer to one another by name; the first one is where an answer begins."""
    return orjson.dumps({"grammars": parts}).decode()


def format_parts(answer: AnswerFormat, name: str = "answer") -> list[Part]:
    """The first part has that name."""
    match answer.kind:
        case FormatKind.SCHEMA:
            return [schema_part(answer.value, name)]
        case FormatKind.REGEX:
            return [lark_part(f"start: /{_escape_slashes(answer.value)}/", name)]
        case FormatKind.CHOICE:
            return [lark_part("start: " + " | ".join(map(quote, answer.value)), name)]
        case FormatKind.GRAMMAR:
            return [lark_part(_as_lark(answer), name)]
        case FormatKind.TAGS:
            return _tag_parts(answer.value, name)


def schema_part(schema: dict[str, Any], name: str, is_lenient: bool = False) -> Part:
    """JSON by a schema, with bounded white space. Lenient: what cannot be kept of the schema is left out."""
    options = {"whitespace_pattern": WHITE_SPACE, "lenient": is_lenient}
    return {"name": name, "json_schema": {**_without_idle(schema), "x-guidance": options}}


def _without_idle(value: Any, has_names: bool = False) -> Any:
    """The same without `uniqueItems: false`, which asks for nothing and which the compiler does not know."""
    if isinstance(value, list):
        return [_without_idle(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        key: each if key in VALUES and not has_names else _without_idle(each, key in NAMES and not has_names)
        for key, each in value.items()
        if has_names or key != "uniqueItems" or each is not False
    }


def lark_part(text: str, name: str) -> Part:
    """Lark with llguidance's additions."""
    return {"name": name, "lark_grammar": text}


def quote(text: str) -> str:
    """A literal in Lark."""
    return json.dumps(text)


def _escape_slashes(regex: str) -> str:
    """A slash or the end of a line ends a regex in Lark. Either may be escaped already, as by Python's re.escape."""
    out, is_escaped = [], False
    for letter in regex:
        written = {"/": "\\/", "\n": "\\n"}.get(letter, letter)
        out.append(written[-1] if is_escaped else written)
        is_escaped = letter == "\\" and not is_escaped
    return "".join(out)


def _as_lark(answer: AnswerFormat) -> str:
    if "::=" not in answer.value:  # Lark; the library takes some of it for GBNF, as where rules begin with a ?
        return str(answer.value)
    try:
        text: str = any_to_lark(answer.value)
    except Exception as error:  # the library raises bare Exception
        message = f"{answer.field}: neither Lark nor GBNF: {first_line(str(error))}"
        raise InvalidRequest(message, answer.field) from error
    return text


def _tag_parts(tags: tuple[dict[str, Any], ...], name: str) -> list[Part]:
    """Text and tags in any order; the text before a tag ends with the tag's trigger."""
    rules = [f"start: ({' | '.join(f'tag_{i}' for i in range(len(tags)))})* TEXT", f"TEXT: {TEXT}"]
    parts = []
    for place, tag in enumerate(tags):
        rest, end = tag["begin"][len(tag["trigger"]) :], tag["end"]
        rules.append(f"open_{place}[lazy]: TEXT {quote(tag['trigger'])}")
        literals = [f"open_{place}", quote(rest) if rest else "", f"@{name}_{place}", quote(end) if end else ""]
        rules.append(f"tag_{place}: {' '.join(literals)}")
        parts.append(schema_part(tag["schema"], f"{name}_{place}"))
    return [lark_part("\n".join(rules), name), *parts]
