"""How many values a body may have. Counted in its bytes, before anybody makes objects of them, which take a hundred
times the room: a body of 8 MB could be a million."""

from __future__ import annotations

from weft.errors import InvalidRequest

MAX_OBJECTS = 65_536
MAX_STRINGS = 262_144


def check_body(*texts: bytes) -> None:
    """JSON texts of one request. Raises InvalidRequest. Numbers do not count: a prompt may be a million token ids."""
    if sum(map(_most, texts)) <= MAX_OBJECTS and sum(text.count(b'"') for text in texts) <= 2 * MAX_STRINGS:
        return  # as nearly every body
    plain = [text.replace(b"\\\\", b"").replace(b'\\"', b"") for text in texts]
    _refuse(sum(text.count(b'"') // 2 for text in plain), MAX_STRINGS, "strings")
    # braces may be what somebody talks about
    _refuse(sum(_most(b"".join(text.split(b'"')[::2])) for text in plain), MAX_OBJECTS, "objects or lists")


def _most(text: bytes) -> int:
    return max(text.count(b"{"), text.count(b"["))


def _refuse(count: int, limit: int, name: str) -> None:
    if count > limit:
        raise InvalidRequest(f"the body has {count} {name}, at most {limit}", None, "invalid_value")
