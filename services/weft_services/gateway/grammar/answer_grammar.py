"""AnswerFormat -> a grammar in llguidance's own form, as workers get it. Compiles nothing."""

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

# models left to themselves may pad JSON with white space without end
WHITE_SPACE = r"[ \t\n\r]{0,16}"
# any text
TEXT = r"/(.|\n)*/"


@dataclass(frozen=True, slots=True)
class GrammarPart:
    """A grammar with a name, by which others refer to it: Lark with llguidance's additions, or a JSON schema.

    `field` is the client's name for what it was made of, `regex` the client's regex in it. Of a lenient schema, what
    cannot be kept is left out.
    """

    name: str
    lark: str = ""
    schema: dict[str, Any] | None = None
    is_lenient: bool = False
    field: str = ""
    regex: str = ""

    def as_json(self) -> dict[str, Any]:
        """As llguidance reads it; a schema with bounded white space."""
        if self.schema is None:
            return {"name": self.name, "lark_grammar": self.lark}
        options = {"whitespace_pattern": WHITE_SPACE, "lenient": self.is_lenient}
        return {"name": self.name, "json_schema": {**self.schema, "x-guidance": options}}


def join_parts(parts: Iterable[GrammarPart]) -> str:
    """Parts refer to one another by name; the first one is where an answer begins."""
    return orjson.dumps({"grammars": [part.as_json() for part in parts]}).decode()


def format_parts(answer: AnswerFormat, name: str = "answer") -> list[GrammarPart]:
    """The first part has that name."""
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
    """JSON by a schema, in the form that llguidance keeps."""
    return GrammarPart(name, schema=supported_schema(schema), is_lenient=is_lenient, field=field)


def lark_part(text: str, name: str) -> GrammarPart:
    """Lark with llguidance's additions."""
    return GrammarPart(name, lark=text)


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
