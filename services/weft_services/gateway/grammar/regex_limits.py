"""Regexes that take long where no limit of the compiler sees it: wide classes that ignore case.

To ignore case a compiler goes through each character of a class. One of all there are takes some 5 ms, costs no fuel,
and fits into five characters. Elsewhere classes are ranges, and cost nothing however wide they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from weft_services.gateway.grammar.answer_grammar import Part

# in all of a request's grammar
MAX_WIDE_CLASSES = 16
# (?i), (?s-i:...) in a regex, /.../i in Lark; more flags than there are would be wrong
IGNORES_CASE = re.compile(r"\?[a-zA-Z-]{0,16}i[a-zA-Z-]{0,16}[:)]|/[imslux]*i")
# without any of these, and without a negation, no class has more than ASCII in it
WIDE = re.compile(r"[^\x00-\x7f]|\\[xuUpPwWDSB]")
# each is gone through by itself, and so is what comes of two
CLASS = re.compile(r"\[|\\[pP]|&&|--|~~")


def complaint(parts: Iterable[Part]) -> str | None:
    """What is too much about them."""
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
    """There may be white space and comments between a bracket and what negates it."""
    return WIDE.search(text) is not None or "^" in text.partition("[")[2]


def _texts(part: Part) -> Iterator[str]:
    """A Lark grammar as it is, and each pattern of a JSON schema."""
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
