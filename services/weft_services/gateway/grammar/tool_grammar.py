"""Builds grammars that allow only calls of the given tools, in the model family's own format.

Arguments are JSON, or each of them has tags of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from weft.errors import InvalidRequest
from weft_services.gateway.generation import ToolUse
from weft_services.gateway.grammar.answer_grammar import TEXT, GrammarPart, lark_part, quote, schema_part
from weft_services.gateway.grammar.schema_rewrite import BINDING, supported_schema
from weft_services.gateway.text.tag_calls import TagSyntax, is_text, named_values, resolved
from weft_services.gateway.text.tool_formats import ARGUMENTS, NAME, NUMBER, SPACE, ToolFormat

ROOT = "arguments"
Marks = Mapping[str, int]  # markers that are single tokens of the vocabulary -> ids
# Constraints that cannot be enforced on free text between tags.
UNKEPT = ("pattern", "minLength", "maxLength", "format")


def tag_parts(
    schema: dict[str, Any], name: str, field: str, is_lenient: bool, tags: TagSyntax, marks: Marks
) -> list[GrammarPart]:
    """Return the grammar of arguments in tags, in the order of the schema's properties.

    Required ones always appear. A text is free or one of the listed values; other values are JSON. `field` is the
    client's name for the schema. Raises InvalidRequest for unsupported constraints, unless lenient.
    """
    whole = resolved(schema, schema)
    properties, required = (whole.get(name) if isinstance(whole, dict) else None for name in ("properties", "required"))
    properties = properties if isinstance(properties, dict) else {}
    required = required if isinstance(required, list) else []
    start, rules, parts = [], [f"TEXT: {TEXT}", *_TERMINALS], list[GrammarPart]()
    end = [f"{tags.padding}{tags.value[1]}{tags.padding}", *([] if tags.padding else [SPACE])]
    has_free = False
    for place, (key, own) in enumerate(properties.items()):
        start.append(f"p{place}" if key in required else f"p{place}?")
        opening = [tags.key[0], key, tags.key[1] + tags.padding, *([SPACE, tags.value[0]] if tags.value[0] else [])]
        meant = resolved(own, schema)
        if not is_text(meant):
            inner = f"{name}_{place}"
            parts.append(schema_part(_alone(own, schema), inner, f"{field}.properties.{key}", is_lenient))
            value = f"@{inner}"
        elif values := _texts(meant):
            value = f"({' | '.join(map(quote, values))})"
        else:
            if not is_lenient:
                _check_free(meant, f"{field}.properties.{key}", field)
            value, has_free = "free", True
        closing = end[1:] if value == "free" else end
        rules.append(f"p{place}: {written(opening, marks, {})} {value} {written(closing, marks, {})}")
    if has_free:
        rules.append(f"free{'' if end[0] in marks else '[lazy]'}: TEXT {written(end[:1], marks, {})}")
    return [lark_part("\n".join([f"start: {' '.join(start) or quote('')}", *rules]), name), *parts]


def _alone(own: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of one value with the definitions that its references need."""
    moved = _moved(own)
    return own if moved == own else {**moved, "$defs": {ROOT: _moved(schema)}}


def _moved(value: Any) -> Any:
    """Return the value with references to the root redirected to the root's new place."""
    if isinstance(value, list):
        return [_moved(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        key: f"#/$defs/{ROOT}{each[1:]}"
        if key == "$ref" and isinstance(each, str) and each[:1] == "#"
        else _moved(each)
        for key, each in value.items()
    }


def _check_free(schema: Any, path: str, field: str) -> None:
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        if not isinstance(each, dict):
            continue
        if (name := next((name for name in UNKEPT if name in each), None)) is not None:
            message = (
                f"{path}.{name}: not supported, because this model writes texts in tags and not as JSON; leave it out"
            )
            raise InvalidRequest(message, field, "invalid_value")
        for inner in (each.get(branch) for branch in ("anyOf", "oneOf", "allOf")):
            waiting += inner if isinstance(inner, list) else []


def _texts(schema: Any) -> list[str]:
    values = named_values(schema) or []
    if not all(isinstance(value, str | None) for value in values):
        return []
    return ["null" if value is None else value for value in values]


def call_parts(use: ToolUse, tool_format: ToolFormat, marks: Marks, name: str) -> list[GrammarPart]:
    """Return the grammar of calls only; the first part has the given name."""
    rules = ["start: calls", *_calls(use, tool_format, marks, name)]
    return [lark_part("\n".join(rules), name), *_argument_parts(use, tool_format, marks, name)]


def text_or_call_parts(use: ToolUse, tool_format: ToolFormat, marks: Marks, name: str) -> list[GrammarPart]:
    """Return the grammar of any text, then optional calls. Calling is optional; the form of a call is not."""
    first = (*tool_format.opening, *tool_format.call)[0]
    if tool_format.text_opening:
        opening = written(tool_format.text_opening, marks, {})
        rules = [f"start: {opening} TEXT | calls", *_calls(use, tool_format, marks, name)]
    elif first in marks:  # text cannot contain this token
        rules = ["start: TEXT calls?", *_calls(use, tool_format, marks, name)]
    elif first in tool_format.markers:
        rules = ["start: FREE | until calls", f"until[lazy]: TEXT {quote(first)}"]
        rules += _calls(use, tool_format, marks, name, num_written=1)
        rules.append(f"FREE: TEXT & ~/(.|\\n)*{_pattern(first)}(.|\\n)*/")
    else:  # an answer is either calls or text, decided by its first characters
        names = "|".join(_pattern(f"[{name}(") for name in use.schemas)
        rules = ["start: FREE | calls", *_calls(use, tool_format, marks, name)]
        rules.append(f"FREE: TEXT & ~/[ \\t\\r\\n]*(\\{{|{names})(.|\\n)*/")
    return [lark_part("\n".join([*rules, f"TEXT: {TEXT}"]), name), *_argument_parts(use, tool_format, marks, name)]


def _pattern(text: str) -> str:
    """Escape the text for a regex in Lark."""
    return re.escape(text).replace("/", "\\/").replace("\n", "n")


def written(pieces: Iterable[str], marks: Marks, places: Mapping[str, str]) -> str:
    """Write the pieces of a call as Lark: markers as tokens if the vocabulary has them, otherwise as text."""
    words = {SPACE: "SPACE?", NUMBER: "NUMBER", **places}
    return " ".join(words.get(piece) or (f"<[{marks[piece]}]>" if piece in marks else quote(piece)) for piece in pieces)


def _calls(use: ToolUse, tool_format: ToolFormat, marks: Marks, name: str, num_written: int = 0) -> list[str]:
    """Return the rule `calls` and its helpers. The first `num_written` pieces are written already."""
    opening, num_left = tool_format.opening[num_written:], max(0, num_written - len(tool_format.opening))
    more = f"({written(tool_format.between, marks, {})} call){{0,{tool_format.max_calls - 1}}}"
    is_single = use.only is not None or not use.is_parallel or tool_format.max_calls == 1
    calls = [written(opening, marks, {}), "first", "" if is_single else more, written(tool_format.closing, marks, {})]
    rules = [f"calls: {' '.join(calls)}", *_TERMINALS]
    for rule, pieces in (("first", tool_format.call[num_left:]), ("call", tool_format.call)):
        choices = [
            written(pieces, marks, {NAME: quote(function["name"]), ARGUMENTS: f"@{name}_{place}"})
            for place, (function, _) in enumerate(use.callable_functions)
        ]
        rules.append(f"{rule}: {' | '.join(choices)}")
    return rules


def _argument_parts(use: ToolUse, tool_format: ToolFormat, marks: Marks, name: str) -> list[GrammarPart]:
    parts: list[GrammarPart] = []
    for place, (function, field) in enumerate(use.callable_functions):
        is_lenient = function.get("strict") is not True
        schema = supported_schema(function.get("parameters") or {})
        if tool_format.tags is not None:
            parts += tag_parts(schema, f"{name}_{place}", field, is_lenient, tool_format.tags, marks)
        elif _takes_nothing(schema):
            parts.append(lark_part(f"start: {quote('{}')}", f"{name}_{place}"))
        else:
            parts.append(schema_part(_of_object(schema), f"{name}_{place}", field, is_lenient))
    return parts


_TERMINALS = ("SPACE: /[ \\n]{1,2}/", "NUMBER: /[0-9]{1,2}/")
# Keyword values of a schema without parameters. Any other value requires parameters, or lets the model invent some.
_NO_PARAMETERS: dict[str, tuple[Any, ...]] = {
    "additionalProperties": (False,),
    "patternProperties": ({},),
    "properties": ({},),
    "required": ([],),
    "type": ("object",),
    "unevaluatedProperties": (False,),
}


def _takes_nothing(schema: dict[str, Any]) -> bool:
    """True if no parameter is named; OpenAI treats a function without a schema this way."""
    whole = resolved(schema, schema)
    return isinstance(whole, dict) and all(
        any(whole[keyword] == each for each in _NO_PARAMETERS.get(keyword, ())) for keyword in BINDING & whole.keys()
    )


def _of_object(schema: dict[str, Any]) -> dict[str, Any]:
    """Require an object, which arguments always are."""
    return schema if "$ref" in schema else {**schema, "type": "object"}
