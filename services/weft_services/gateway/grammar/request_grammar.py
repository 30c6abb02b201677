"""Builds the grammar of a request from its answer format, its tools, and thoughts before either.

Rejects wide classes that ignore case: no limit of the compiler covers their cost. The compiler visits every
character of such a class. A class of all characters takes about 5 ms, costs no fuel, and needs only five characters of
source. Other classes are ranges and cost nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import orjson

from weft.errors import InvalidRequest
from weft.grammar import UnusableGrammar
from weft.request import Grammar
from weft_services.gateway.generation import AnswerFormat, Conversation, Generation
from weft_services.gateway.grammar.answer_grammar import TEXT, GrammarPart, format_parts, join_parts, lark_part
from weft_services.gateway.grammar.schema_rewrite import VALUES, without_pattern
from weft_services.gateway.grammar.tool_grammar import Marks, call_parts, text_or_call_parts, written
from weft_services.gateway.model import ServedModel
from weft_services.gateway.text.assistant import ThoughtTags, tag_pieces
from weft_services.gateway.text.harmony import ANALYSIS, END, FINAL_PIECES, START
from weft_services.gateway.text.tag_calls import resolve_reference

# limit for all grammars of a request
MAX_WIDE_CLASSES = 16
# (?i), (?s-i:...) in a regex, /.../i in Lark; longer lists of flags are invalid.
IGNORES_CASE = re.compile(r"\?[a-zA-Z-]{0,16}i[a-zA-Z-]{0,16}[:)]|/[imslux]*i")
# Without any of these, and without negation, a class contains only ASCII.
WIDE = re.compile(r"[^\x00-\x7f]|\\[xuUpPwWDSB]")
# Each of these is expanded separately, and so is the result of combining two.
CLASS = re.compile(r"\[|\\[pP]|&&|--|~~")


def regex_cost_error(parts: Iterable[GrammarPart]) -> str | None:
    """Return what is wrong if the regexes of the parts are too expensive; None if they are not."""
    number = sum(
        len(CLASS.findall(text))
        for part in parts
        for text in _texts(part)
        if IGNORES_CASE.search(text) and _is_wide(text)
    )
    if number <= MAX_WIDE_CLASSES:
        return None
    return (
        f"{number} classes of characters in regexes that ignore case and look beyond ASCII, at most {MAX_WIDE_CLASSES}"
    )


def _is_wide(text: str) -> bool:
    """True if a class may exceed ASCII. White space and comments may separate a bracket from its negation."""
    return WIDE.search(text) is not None or "^" in text.partition("[")[2]


def _texts(part: GrammarPart) -> Iterator[str]:
    """Return the Lark source, and every pattern of a JSON schema."""
    yield part.lark
    waiting: list[Any] = [part.schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if isinstance(pattern := value.get("pattern"), str):
                yield pattern
            if isinstance(by_pattern := value.get("patternProperties"), dict):
                yield from by_pattern
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


NAME = "answer"
# each costs a compilation
MAX_DROPPED_REGEXES = 8


def request_grammar(generation: Generation, model: ServedModel, is_thinking: bool) -> Grammar | None:
    """Return the grammar of a request; None if it has none. Raises InvalidRequest naming the field.

    It is compiled here only to report errors; workers get the text and compile it again.
    """
    field, parts = _parts(generation, model)
    if not parts:
        return None
    is_chat = isinstance(generation.prompts[0], Conversation)
    if is_chat and model.has_channels:
        if is_thinking or not _is_continued(generation):
            parts = [_channels(model.marks, is_thinking), *parts]
    elif is_chat and model.thought_tags:
        parts = [_thoughts(model.thought_tags, model.marks, is_thinking), *parts]
    if (found := regex_cost_error(parts)) is not None:
        raise InvalidRequest(f"{field}: {found}", field, "invalid_value")
    return Grammar(_compiled(field, parts, model), model.grammars.tokenizer_hash)


def _compiled(field: str, parts: list[GrammarPart], model: ServedModel) -> str:
    """Return the text of a grammar that compiles. Unsupported regexes of tools that are not strict are dropped."""
    for _ in range(MAX_DROPPED_REGEXES):
        text = join_parts(parts)
        try:
            model.grammars.compile(text)
            return text
        except UnusableGrammar as error:
            loose = drop_rejected_regex(error, parts)
            if loose is None:
                raise locate_error(error, parts, field) from error
            parts = loose
        except InvalidRequest as error:
            raise InvalidRequest(f"{field}: {error}", field, "invalid_value") from error
    message = f"{field}: more than {MAX_DROPPED_REGEXES} unsupported regexes; leave them out"
    raise InvalidRequest(message, field, "invalid_value")


def _parts(generation: Generation, model: ServedModel) -> tuple[str, list[GrammarPart]]:
    answer, use, tool_format = generation.answer_format, generation.tool_use, model.tool_format
    if use is None or tool_format is None:
        if use is not None and use.is_forced:
            message = "tool_choice: it is not known how this model writes tool calls; see WEFT_TOOL_FORMAT"
            raise InvalidRequest(message, "tool_choice", "unsupported_parameter")
        return (answer.field, _format_parts(answer, generation, model, NAME)) if answer else ("", [])
    if not tool_format.is_enforceable:
        field = "tool_choice" if use.is_forced else "tools" if use.is_constrained else answer.field if answer else None
        if field is not None:
            message = f"{field}: calls in the format of this model cannot be enforced; let it choose freely"
            raise InvalidRequest(message, field, "unsupported_parameter")
        return "", []
    if model.has_channels and _is_continued(generation) and (use.is_forced or use.is_constrained or answer):
        message = "messages: this model calls tools in a message of its own; end the one that the answer continues"
        raise InvalidRequest(message, "messages", "unsupported_parameter")
    if use.is_forced:
        return "tools", call_parts(use, tool_format, model.marks, NAME)
    if answer is not None:
        either = lark_part("start: @format | @calls", NAME)
        calls = call_parts(use, tool_format, model.marks, "calls")
        return answer.field, [either, *_format_parts(answer, generation, model, "format"), *calls]
    return "tools", text_or_call_parts(use, tool_format, model.marks, NAME) if use.is_constrained else []


def _format_parts(answer: AnswerFormat, generation: Generation, model: ServedModel, name: str) -> list[GrammarPart]:
    """Return the parts of the answer's format, within the message that has the answer."""
    is_chat = isinstance(generation.prompts[0], Conversation)
    if not is_chat or not model.has_channels or _is_continued(generation):
        return format_parts(answer, name)
    opening = written(FINAL_PIECES, model.marks, {})
    return [lark_part(f"start: {opening} @message", name), *format_parts(answer, "message")]


def _is_continued(generation: Generation) -> bool:
    prompt = generation.prompts[0]
    return isinstance(prompt, Conversation) and prompt.is_continued


def _channels(marks: Marks, is_thinking: bool) -> GrammarPart:
    """Return the part for messages of thoughts, and the answer's own message behind them."""
    opening, closing, following = (
        written(each, marks, {}) for each in (tag_pieces(ANALYSIS), (END,), (START, "assistant"))
    )
    end = f"TEXT {closing}" if END in marks else "until"
    rules = [
        f"start: {f'{end} {following} ' if is_thinking else ''}({opening} {end} {following})* @{NAME}",
        f"TEXT: {TEXT}",
    ]
    if end == "until":
        rules.append(f"until[lazy]: TEXT {closing}")
    return lark_part("\n".join(rules), "thoughts")


def _thoughts(tags: ThoughtTags, marks: Marks, is_thinking: bool) -> GrammarPart:
    """Return the part for thoughts: free text up to their end, then the answer."""
    opening, closing = (written(tag_pieces(tag), marks, {}) for tag in tags)
    end = f"TEXT {closing}" if tags[1] in marks else "until"
    start = f"start: {end} SPACE? @{NAME}" if is_thinking else f"start: ({opening} {end} SPACE?)? @{NAME}"
    rules = [start, f"TEXT: {TEXT}", "SPACE: /[ \\n]{1,4}/"]
    if end == "until":
        rules.append(f"until[lazy]: TEXT {closing}")
    return lark_part("\n".join(rules), "thoughts")


MAX_SHOWN = 200
DEFINITIONS = ("$defs", "definitions")
# the compiler's words -> candidate keywords, what is wrong and what to do
COMPILER_MESSAGES = (
    ("oneOf constraints are not supported", ("oneOf",), "a value may fit two of these schemas; write anyOf"),
    (
        "min/maxProperties only supported",
        ("minProperties", "maxProperties"),
        "not supported unless all properties are required; leave it out or require them",
    ),
    ("patternProperty regexes", ("patternProperties",), "a key may match two of these patterns; write one for both"),
)
# assertions by the compiler's names
ASSERTIONS = {"WordUnicode": r"\b", "WordUnicodeNegate": r"\B", "Start": "^", "End": "$"}
CLASSES = {"d": "[0-9]", "D": "[^0-9]", "w": "[0-9a-zA-Z_]", "W": "[^0-9a-zA-Z_]"}


@dataclass(frozen=True, slots=True)
class _Place:
    """A keyword and its value. `field` is the client's name for the schema, `path` for the keyword."""

    field: str
    path: str
    keyword: str
    value: Any

    @property
    def pattern(self) -> str | None:
        """The client's regex, if the keyword is one."""
        is_regex = self.keyword in ("pattern", "patternProperties") and isinstance(self.value, str)
        return self.value if is_regex else None


def locate_error(error: UnusableGrammar, parts: list[GrammarPart], field: str) -> InvalidRequest:
    """Return the error with the place it refers to, or with `field` if the place is unknown."""
    places = [place for part in parts for place in _places(part)]
    place, message = _of_keyword(error.details, places) or _of_regex(error.details, places) or (None, "")
    if place is None:
        return InvalidRequest(f"{field}: {error}", field, "invalid_value")
    return InvalidRequest(f"{place.path}: {message}", place.field, "invalid_value")


def drop_rejected_regex(error: UnusableGrammar, parts: list[GrammarPart]) -> list[GrammarPart] | None:
    """Return the parts without the regex in question; None if a schema that is not lenient has it."""
    found = _of_regex(error.details, [place for part in parts for place in _places(part)])
    pattern = found and found[0].pattern
    holders = [part for part in parts if any(place.pattern == pattern for place in _places(part))] if pattern else []
    if pattern is None or not all(part.is_lenient for part in holders):
        return None
    return [replace(part, schema=without_pattern(part.schema, pattern)) if part in holders else part for part in parts]


def _of_regex(details: str, places: Iterable[_Place]) -> tuple[_Place, str] | None:
    """Find the regex that the error quotes; of several candidates the longest."""
    if "regex" not in details:
        return None
    found = [place for place in places if place.pattern and _is_in(place.pattern, details)]
    if not found:
        return None
    place = max(found, key=lambda each: len(str(each.pattern)))
    return (
        place,
        f"{str(place.pattern)[:MAX_SHOWN]!r} is not supported: {_reason(details)}; write it without, or leave it out",
    )


def _is_in(pattern: str, details: str) -> bool:
    """True if the error quotes the pattern, unchanged or as the compiler rewrites it."""
    forms = (pattern, _in_lark(pattern, {}), _in_lark(pattern, CLASSES), orjson.dumps(pattern).decode()[1:-1])
    return any(each in details for each in forms)


def _in_lark(pattern: str, classes: dict[str, str]) -> str:
    return re.sub(r"\\(.)|/", lambda found: classes.get(found[1], found[0]) if found[1] else "\\/", pattern)


def _reason(details: str) -> str:
    """Return the regex crate's last line, or what another limit found."""
    if found := re.search(r"^error: (.*)$", details, re.MULTILINE):
        return found[1]
    if found := re.search(r"lookarounds not supported yet; (\w+)", details):
        return f"look-around is not supported ({ASSERTIONS.get(found[1], found[1])})"
    return details.partition("\n")[0][:MAX_SHOWN]


def _of_keyword(details: str, places: Iterable[_Place]) -> tuple[_Place, str] | None:
    for words, keywords, message in COMPILER_MESSAGES:
        if words in details:
            return _first(places, keywords, message)
    if found := re.search(r"Unimplemented keys: (\[.*\])", details):
        return _first(places, orjson.loads(found[1]), "this keyword is not supported; leave it out")
    if found := re.search(r"Invalid type: (.*)", details):
        named = [place for place in places if place.keyword == "type" and _names(place.value, found[1])]
        return _first(named, ("type",), f"{found[1][:MAX_SHOWN]!r} is no type; write one of JSON Schema's seven")
    if found := re.search(r"Expected (.*) for '(\w+)', got (.{0,99})", details):
        named = [place for place in places if orjson.dumps(place.value).decode().startswith(found[3])]
        return _first(named, (found[2],), f"expected {found[1]}, got {found[3]}")
    return None


def _first(places: Iterable[_Place], keywords: Iterable[str], message: str) -> tuple[_Place, str] | None:
    place = next((place for place in places if place.keyword in keywords), None)
    return None if place is None else (place, message)


def _names(value: Any, kind: str) -> bool:
    return value == kind or (isinstance(value, list) and kind in value)


def _places(part: GrammarPart) -> Iterator[_Place]:
    """Yield all keywords in the order of the schema; definitions at their first reference."""
    if part.regex:
        yield _Place(part.field, part.field, "pattern", part.regex)
    waiting: list[tuple[str, Any]] = [(part.field, part.schema)]
    seen: set[str] = set()
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, list):
            waiting += [(f"{path}.{number}", each) for number, each in enumerate(value)][::-1]
            continue
        if not isinstance(value, dict):
            continue
        inner: list[tuple[str, Any]] = []
        for key, each in value.items():
            yield _Place(part.field, f"{path}.{key}", key, each)
            if path.endswith(".patternProperties"):
                yield _Place(part.field, f"{path}.{key}", "patternProperties", key)
            if key not in VALUES and key not in DEFINITIONS:
                inner.append((f"{path}.{key}", each))
            if key == "$ref" and isinstance(each, str) and each not in seen:
                seen.add(each)
                inner.append((part.field + each[1:].replace("/", "."), resolve_reference(each, part.schema)))
        waiting += inner[::-1]
