"""How many values a body may have. Counted in its bytes, before anybody makes objects of them, which take a hundred
times the room: a body of 8 MB could be a million."""

from __future__ import annotations

from weft.errors import InvalidRequest

MAX_OBJECTS = 65_536
MAX_STRINGS = 262_144


def check_body(body: bytes) -> None:
    """Raises InvalidRequest. Numbers are not counted: a prompt may be a million token ids."""
    if _most(body) <= MAX_OBJECTS and body.count(b'"') <= 2 * MAX_STRINGS:
        return  # as nearly every body
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    _refuse(plain.count(b'"') // 2, MAX_STRINGS, "strings")
    # braces may be what somebody talks about
    _refuse(_most(b"".join(plain.split(b'"')[::2])), MAX_OBJECTS, "objects or lists")


def _most(body: bytes) -> int:
    return max(body.count(b"{"), body.count(b"["))


def _refuse(count: int, limit: int, name: str) -> None:
    if count > limit:
        raise InvalidRequest(f"the body has {count} {name}, at most {limit}", None, "invalid_value")
