"""Builds the grammar of a request from its answer format, its tools, and thoughts before either.

Rejects wide classes that ignore case: no limit of the compiler covers their cost. The compiler visits every
character of such a class. A class of all characters takes about 5 ms, costs no fuel, and needs only five characters of
source. Other classes are ranges and cost nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from weft.errors import InvalidRequest
from weft.grammar import UnusableGrammar
from weft.request import Grammar
from weft_services.gateway.generation import Conversation, Generation
from weft_services.gateway.grammar.answer_grammar import TEXT, GrammarPart, format_parts, join_parts, lark_part, quote
from weft_services.gateway.grammar.schema_errors import drop_rejected_regex, locate_error
from weft_services.gateway.grammar.tool_grammar import call_parts, text_or_call_parts
from weft_services.gateway.model import ServedModel
from weft_services.gateway.text.assistant import END_THINK, THINK

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
    if model.thinks and isinstance(generation.prompts[0], Conversation):
        parts = [_thoughts(model, is_thinking), *parts]
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
        return (answer.field, format_parts(answer, NAME)) if answer else ("", [])
    if use.is_forced:
        return "tools", call_parts(use, tool_format, model.marks, NAME)
    if answer is not None:
        either = lark_part("start: @format | @calls", NAME)
        calls = call_parts(use, tool_format, model.marks, "calls")
        return answer.field, [either, *format_parts(answer, "format"), *calls]
    return "tools", text_or_call_parts(use, tool_format, model.marks, NAME) if use.is_constrained else []


def _thoughts(model: ServedModel, is_thinking: bool) -> GrammarPart:
    """Return the part for thoughts: free text up to their end, then the answer."""
    end = f"TEXT <[{model.marks[END_THINK]}]>" if END_THINK in model.marks else "until"
    begin = f"<[{model.marks[THINK]}]>" if THINK in model.marks else quote(THINK)
    start = f"start: {end} SPACE? @{NAME}" if is_thinking else f"start: ({begin} {end} SPACE?)? @{NAME}"
    rules = [start, f"TEXT: {TEXT}", "SPACE: /[ \\n]{1,4}/"]
    if end == "until":
        rules.append(f"until[lazy]: TEXT {quote(END_THINK)}")
    return lark_part("\n".join(rules), "thoughts")
