"""How many values a body may have. Counted in its bytes, before anybody makes objects of them, which take a hundred
times the room: a body of 8 MB could be a million."""

from __future__ import annotations

from typing import Any

from weft.errors import InvalidRequest

MAX_OBJECTS = 65_536
MAX_STRINGS = 262_144
# levels of objects and lists; some of what writes JSON or walks through it ends at 250
MAX_LEVELS = 128


def check_body(*texts: bytes) -> None:
    """JSON texts of one request. Raises InvalidRequest. Numbers do not count: a prompt may be a million token ids."""
    if sum(map(_most, texts)) <= MAX_OBJECTS and sum(text.count(b'"') for text in texts) <= 2 * MAX_STRINGS:
        return  # as nearly every body
    plain = [text.replace(b"\\\\", b"").replace(b'\\"', b"") for text in texts]
    _refuse(sum(text.count(b'"') // 2 for text in plain), MAX_STRINGS, "strings")
    # braces may be what somebody talks about
    _refuse(sum(_most(b"".join(text.split(b'"')[::2])) for text in plain), MAX_OBJECTS, "objects or lists")


def check_depth(text: str | bytes, value: Any, field: str | None = None) -> None:
    """`value` is what was read from the text. Raises InvalidRequest naming the field."""
    if may_be_deep(text) and (depth := depth_of(value)) > MAX_LEVELS:
        says = f"JSON nested {depth} levels deep, at most {MAX_LEVELS}"
        raise InvalidRequest(f"{field}: {says}" if field else f"the body is {says}", field, "invalid_value")


def may_be_deep(text: str | bytes) -> bool:
    """Not without as many brackets, which most texts do not have."""
    brackets = ("{", "[") if isinstance(text, str) else (b"{", b"[")
    return sum(map(text.count, brackets)) > MAX_LEVELS  # type: ignore[arg-type]


def depth_of(value: Any) -> int:
    """Levels of objects and lists."""
    depth, level = 0, [value]
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        level = [inner for each in level for inner in (each.values() if isinstance(each, dict) else each)]
    return depth


def _most(text: bytes) -> int:
    return max(text.count(b"{"), text.count(b"["))


def _refuse(count: int, limit: int, name: str) -> None:
    if count > limit:
        raise InvalidRequest(f"the body has {count} {name}, at most {limit}", None, "invalid_value")
