"""How many fields a protobuf message may have. Counted in its bytes, as `body_limits` does with JSON: a message of 8 MB
could be four million empty ones, and reading those would stop the interpreter for seconds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from weft.errors import InvalidRequest

MAX_FIELDS = 65_536
# 32-bit ones, most of which come in packed lists: as many as a JSON body has room for
MAX_NUMBERS = 4 * 1024 * 1024
MAX_VARINT_BYTES = 10
# bytes after which their number goes on
UNFINISHED = bytes(range(0x80, 0x100))


def check_message(raw: bytes, kind: type[Message]) -> None:
    """Raises InvalidRequest, also for bytes that are no message as far as that is seen here."""
    if len(raw) // 2 <= MAX_FIELDS:
        return  # no field is shorter than two bytes
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
    """The number of each, and where what it holds begins and ends."""
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
