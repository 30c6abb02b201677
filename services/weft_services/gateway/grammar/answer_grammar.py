"""Converts an AnswerFormat to a grammar in llguidance's own form, which workers compile."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import orjson
from llguidance.gbnf_to_lark import any_to_lark

from weft.errors import InvalidRequest
from weft.grammar import first_line
from weft_services.gateway.generation import AnswerFormat, FormatKind
from weft_services.gateway.grammar.schema_rewrite import supported_schema, without_look_ahead

# Unconstrained models may pad JSON with white space without end.
WHITE_SPACE = r"[ \t\n\r]{0,16}"
# any text
TEXT = r"/(.|\n)*/"


@dataclass(frozen=True, slots=True)
class GrammarPart:
    """A named grammar, to which others can refer: Lark with llguidance's additions, or a JSON schema.

    `field`: the client's name for its source. `regex`: the client's regex in it. A lenient schema drops constraints
    that llguidance does not support.
    """

    name: str
    lark: str = ""
    schema: dict[str, Any] | None = None
    is_lenient: bool = False
    field: str = ""
    regex: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the grammar as llguidance reads it; a schema allows bounded white space only."""
        if self.schema is None:
            return {"name": self.name, "lark_grammar": self.lark}
        options = {"whitespace_pattern": WHITE_SPACE, "lenient": self.is_lenient}
        return {"name": self.name, "json_schema": {**self.schema, "x-guidance": options}}


def join_parts(parts: Iterable[GrammarPart]) -> str:
    """Serialize parts that refer to one another by name; an answer begins with the first."""
    return orjson.dumps({"grammars": [part.as_json() for part in parts]}).decode()


def format_parts(answer: AnswerFormat, name: str = "answer") -> list[GrammarPart]:
    """Return the parts of an answer format; the first has the given name."""
    match answer.kind:
        case FormatKind.SCHEMA:
            return [schema_part(answer.value, name, answer.field)]
        case FormatKind.REGEX:
            regex = without_look_ahead(answer.value)
            text = f"start: /{_escape_slashes(regex)}/"
            return [GrammarPart(name, lark=text, field=answer.field, regex=regex)]
        case FormatKind.CHOICE:
            return [lark_part("start: " + " | ".join(map(quote, answer.value)), name)]
        case FormatKind.GRAMMAR:
            return [lark_part(_as_lark(answer), name)]
        case FormatKind.TAGS:
            return _tag_parts(answer, name)


def schema_part(schema: dict[str, Any], name: str, field: str, is_lenient: bool = False) -> GrammarPart:
    """Return a part for JSON by a schema, rewritten to what llguidance supports."""
    return GrammarPart(name, schema=supported_schema(schema), is_lenient=is_lenient, field=field)


def lark_part(text: str, name: str) -> GrammarPart:
    """Return a part in Lark with llguidance's additions."""
    return GrammarPart(name, lark=text)


def quote(text: str) -> str:
    """Quote a literal for Lark."""
    return json.dumps(text)


def _escape_slashes(regex: str) -> str:
    """Escape slashes and line ends, which end a regex in Lark.

    Some may be escaped already, as by Python's re.escape.
    """
    out, is_escaped = [], False
    for letter in regex:
        written = {"/": "\\/", "\n": "\\n"}.get(letter, letter)
        out.append(written[-1] if is_escaped else written)
        is_escaped = letter == "\\" and not is_escaped
    return "".join(out)


def _as_lark(answer: AnswerFormat) -> str:
    if "::=" not in answer.value:  # Lark; the library mistakes some of it for GBNF, such as rules that begin with `?`
        return str(answer.value)
    try:
        text: str = any_to_lark(answer.value)
    except Exception as error:  # the library raises bare Exception
        message = f"{answer.field}: neither Lark nor GBNF: {first_line(str(error))}"
        raise InvalidRequest(message, answer.field) from error
    return text


def _tag_parts(answer: AnswerFormat, name: str) -> list[GrammarPart]:
    """Text and tags in any order; the text before a tag ends with the tag's trigger."""
    tags: tuple[dict[str, Any], ...] = answer.value
    rules = [f"start: ({' | '.join(f'tag_{i}' for i in range(len(tags)))})* TEXT", f"TEXT: {TEXT}"]
    parts = []
    for place, tag in enumerate(tags):
        rest, end = tag["begin"][len(tag["trigger"]) :], tag["end"]
        rules.append(f"open_{place}[lazy]: TEXT {quote(tag['trigger'])}")
        literals = [f"open_{place}", quote(rest) if rest else "", f"@{name}_{place}", quote(end) if end else ""]
        rules.append(f"tag_{place}: {' '.join(literals)}")
        field = f"{answer.field}.structures.{place}.schema"
        parts.append(schema_part(tag["schema"], f"{name}_{place}", field))
    return [lark_part("\n".join(rules), name), *parts]
