"""What is counted in a body's bytes is what a JSON parser finds there."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import InvalidRequest
from weft_services.gateway.dialects import body_limits
from weft_services.gateway.dialects.anthropic_requests import parse_count, parse_messages
from weft_services.gateway.dialects.body_limits import MAX_OBJECTS, check_body
from weft_services.gateway.dialects.openai_requests import parse_chat, parse_completion
from weft_services.gateway.dialects.responses_requests import parse_responses
from weft_services.gateway.dialects.tokenize_requests import parse_tokenize

TRICKY = st.text('{["\\}]x', max_size=6)
VALUES = st.recursive(
    st.one_of(st.none(), st.integers(-9, 9), TRICKY),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TRICKY, inner, max_size=4),
    max_leaves=25,
)


def count(value: Any) -> dict[str, int]:
    """Lists, objects and strings, names included."""
    counts = {"lists": 0, "objects": 0, "strings": 0}

    def walk(value: Any) -> None:
        if isinstance(value, list | dict):
            counts["lists" if isinstance(value, list) else "objects"] += 1
            for each in value if isinstance(value, list) else (*value, *value.values()):
                walk(each)
        counts["strings"] += isinstance(value, str)

    walk(value)
    return counts


@pytest.mark.parametrize(
    "dump", [orjson.dumps, lambda value: json.dumps(value, indent=1).encode()], ids=["orjson", "json"]
)
@given(value=VALUES, max_objects=st.integers(0, 8), max_strings=st.integers(0, 8))
def test_a_body_is_refused_when_it_has_more_than_it_may(
    dump: Any, value: Any, max_objects: int, max_strings: int
) -> None:
    counts = count(value)
    is_too_much = counts["strings"] > max_strings or max(counts["lists"], counts["objects"]) > max_objects
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_limits, "MAX_OBJECTS", max_objects)
        patch.setattr(body_limits, "MAX_STRINGS", max_strings)
        if is_too_much:
            with pytest.raises(InvalidRequest, match="at most"):
                check_body(dump(value))
        else:
            check_body(dump(value))


OBJECTS = b"[%b]" % (b"{}," * (MAX_OBJECTS + 1))[:-1]


@pytest.mark.parametrize(
    ("parse", "field"),
    [
        (parse_chat, b"messages"),
        (parse_completion, b"prompt"),
        (parse_responses, b"input"),
        (parse_messages, b"messages"),
        (parse_count, b"messages"),
        (parse_tokenize, b"messages"),
    ],
)
def test_every_api_counts_before_it_reads(parse: Any, field: bytes) -> None:
    with pytest.raises(InvalidRequest, match=f"the body has {MAX_OBJECTS + 2} objects"):
        parse(b'{"model":"m","max_tokens":1,"%b":%b}' % (field, OBJECTS))


def test_json_within_json_counts_too() -> None:
    half = "[" + ",".join(["{}"] * (MAX_OBJECTS // 2 + 1)) + "]"
    calls = [{"type": "function", "function": {"name": "f", "arguments": half}} for _ in range(2)]
    user, assistant = {"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": calls}
    for parse in (parse_chat, parse_tokenize):
        for messages in ([user, assistant], [user, *({**assistant, "tool_calls": [call]} for call in calls)]):
            with pytest.raises(InvalidRequest, match=f"the body has {MAX_OBJECTS + 2} objects"):
                parse(json.dumps({"model": "m", "messages": messages}).encode())
        parse(json.dumps({"model": "m", "messages": [user, {**assistant, "tool_calls": calls[:1]}]}).encode())
    for field in ({"guided_json": OBJECTS.decode()}, {"structured_outputs": {"structural_tag": OBJECTS.decode()}}):
        with pytest.raises(InvalidRequest, match=r"more than 65536 bytes|the body has \d+ objects"):
            parse_chat(json.dumps({"model": "m", "messages": [user], **field}).encode())
