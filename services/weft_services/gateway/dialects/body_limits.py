"""Limits on the number of values in JSON and protobuf bodies.

They are counted in the raw bytes, because Python objects take a hundred times the memory. A JSON body of 8 MB could
hold a million objects. A protobuf message of that size could hold four million empty messages, which would block the
interpreter for seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from weft.errors import InvalidRequest

MAX_OBJECTS = 65_536
MAX_STRINGS = 262_144
# Levels of objects and lists. Some JSON writers and tree walkers fail at 250.
MAX_LEVELS = 128
MAX_FIELDS = 65_536
# 32-bit numbers, most of them in packed lists. A JSON body has space for as many.
MAX_NUMBERS = 4 * 1024 * 1024
MAX_VARINT_BYTES = 10
# Bytes with the continuation bit of a varint.
UNFINISHED = bytes(range(0x80, 0x100))


def check_body(*texts: bytes) -> None:
    """Check all JSON texts of one request. Raises InvalidRequest.

    Numbers do not count: a prompt may be a million token ids.
    """
    if sum(map(_most, texts)) <= MAX_OBJECTS and sum(text.count(b'"') for text in texts) <= 2 * MAX_STRINGS:
        return  # nearly every body
    plain = [text.replace(b"\\\\", b"").replace(b'\\"', b"") for text in texts]
    _refuse(sum(text.count(b'"') // 2 for text in plain), MAX_STRINGS, "strings")
    # Count only braces outside strings.
    _refuse(sum(_most(b"".join(text.split(b'"')[::2])) for text in plain), MAX_OBJECTS, "objects or lists")


def check_depth(text: str | bytes, value: Any, field: str | None = None) -> None:
    """Raise InvalidRequest naming the field if `value`, parsed from `text`, is nested too deeply."""
    if may_be_deep(text) and (depth := depth_of(value)) > MAX_LEVELS:
        message = f"JSON nested {depth} levels deep, at most {MAX_LEVELS}"
        raise InvalidRequest(f"{field}: {message}" if field else f"the body is {message}", field, "invalid_value")


def may_be_deep(text: str | bytes) -> bool:
    """Quick test: most texts have fewer brackets than MAX_LEVELS."""
    brackets = ("{", "[") if isinstance(text, str) else (b"{", b"[")
    return sum(map(text.count, brackets)) > MAX_LEVELS  # type: ignore[arg-type]


def depth_of(value: Any) -> int:
    """Return the levels of nested objects and lists."""
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


def check_message(raw: bytes, kind: type[Message]) -> None:
    """Raise InvalidRequest for too many fields or numbers, or for bytes that are visibly not a message."""
    if len(raw) // 2 <= MAX_FIELDS:
        return  # every field takes at least two bytes
    left, numbers = MAX_FIELDS, MAX_NUMBERS
    waiting: list[tuple[Any, int, int]] = [(kind.DESCRIPTOR, 0, len(raw))]
    while waiting:
        descriptor, begin, end = waiting.pop()
        for number, start, after in _fields(raw, begin, end):
            if (left := left - 1) < 0:
                raise InvalidRequest(f"the message has more than {MAX_FIELDS} fields", None, "invalid_value")
            field = descriptor.fields_by_number.get(number)
            if field is None:
                continue
            if field.message_type is not None:
                waiting.append((field.message_type, start, after))
            elif field.cpp_type == FieldDescriptor.CPPTYPE_UINT32:
                numbers -= len(raw[start:after].translate(None, UNFINISHED))
        if numbers < 0:
            raise InvalidRequest(f"the message has more than {MAX_NUMBERS} numbers", None, "invalid_value")


def _fields(raw: bytes, place: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield each field's number with the start and end of its value."""
    while place < end:
        tag, place = _varint(raw, place)
        match tag & 7:
            case 0:
                _, after = _varint(raw, place)
            case 1:
                after = place + 8
            case 2:
                size, place = _varint(raw, place)
                after = place + size
            case 5:
                after = place + 4
            case _:
                after = place  # a group begins or ends
        if after > end:
            raise InvalidRequest("the message is cut off", None, "invalid_value")
        yield tag >> 3, place, after
        place = after


def _varint(raw: bytes, place: int) -> tuple[int, int]:
    value = 0
    for number, byte in enumerate(raw[place : place + MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * number
        if byte < 0x80:
            return value, place + number + 1
    raise InvalidRequest("the message has a number that does not end", None, "invalid_value")
