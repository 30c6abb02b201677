"""The patterns that pydantic 2.12 writes for decimals, in a form without look-ahead.

Theirs begin with `(?!^[-+.]*$)`, for at least one digit. Two of the four forms then bound nothing, as one branch has no
`$`: those become what they are meant to say, which is narrower.
"""

from __future__ import annotations

import re

MAX_DIGITS = 64
PREFIX = r"^(?!^[-+.]*$)[+-]?0*"
FREE = re.compile(r"\\d\*\\\.\?\\d(?:\*|\{0,(?P<places>\d{1,3})\}0\*)\$")
BOUNDED = re.compile(
    r"\(\?:\\d\{0,(?P<whole>\d{1,3})\}\|\(\?=\[\\d\.\]\{1,(?P<size>\d{1,3})\}0\*\$\)"
    r"\\d(?:\*|\{0,\d{1,3}\})\\\.\\d(?:\*|\{0,(?P<places>\d{1,3})\})0\*\$\)"
)


def without_look_ahead(pattern: str) -> str:
    """The same texts, or fewer: see above. A pattern of another form comes back as it is."""
    if not pattern.startswith(PREFIX):
        return pattern
    rest = pattern[len(PREFIX) :]
    if found := FREE.fullmatch(rest):
        places = found["places"]
        after, least = (r"\d*", r"\d+") if places is None else _fractions(int(places))
        return rf"^[+-]?(?:\d+(?:\.{after})?|\.{least})$"
    found = BOUNDED.fullmatch(rest)
    if found is None or int(found["size"]) - 1 > MAX_DIGITS:
        return pattern
    whole, digits = int(found["whole"]), int(found["size"]) - 1
    if found["places"] is None:
        return _any_places(digits)
    after, least = _fractions(min(int(found["places"]), digits))
    before = rf"0*\d{{1,{whole}}}" if whole else "0+"
    return rf"^[+-]?(?:{before}(?:\.{after})?|0*\.{least})$"


def _fractions(places: int) -> tuple[str, str]:
    """What may follow a point: at all, and with at least one digit."""
    return rf"\d{{0,{places}}}0*", rf"\d{{1,{places}}}0*" if places else "0+"


def _any_places(digits: int) -> str:
    """That many digits on both sides of the point together, zeros at either end not counted."""
    forms = [rf"0*\d{{1,{digits}}}(?:\.0*)?"]
    forms += [rf"0*\d{{{whole}}}\.\d{{1,{digits - whole}}}0*" for whole in range(digits)]
    return rf"^[+-]?(?:{'|'.join(forms)})$"
