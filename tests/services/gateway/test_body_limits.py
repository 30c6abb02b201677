"""The value count in raw bytes equals a JSON parser's own; limits on nesting."""

from __future__ import annotations

import json
from typing import Any

import grpc
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.services.gateway.conftest import MODEL_NAME, MakeBench
from weft.errors import InvalidRequest
from weft_mesh.v1 import inference_service_pb2 as pb
from weft_mesh.v1.inference_service_pb2_grpc import InferenceServiceStub
from weft_services.gateway.dialects import body_checks
from weft_services.gateway.dialects.anthropic_requests import parse_count, parse_messages
from weft_services.gateway.dialects.body_checks import MAX_OBJECTS, check_body
from weft_services.gateway.dialects.openai_requests import parse_chat, parse_completion
from weft_services.gateway.dialects.responses_requests import parse_responses
from weft_services.gateway.dialects.token_requests import parse_tokenize

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
        patch.setattr(body_checks, "MAX_OBJECTS", max_objects)
        patch.setattr(body_checks, "MAX_STRINGS", max_strings)
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


def nested(depth: int) -> Any:
    """So many objects in one another."""
    value: Any = {}
    for _ in range(depth - 1):
        value = {"a": value}
    return value


DEEP = nested(300)
TOOL = {"type": "function", "function": {"name": "f", "parameters": DEEP}}
USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": [USER], "tools": [TOOL]}),
        ("/v1/messages", {"messages": [USER], "max_tokens": 1, "tools": [{"name": "f", "input_schema": DEEP}]}),
        ("/v1/messages/count_tokens", {"messages": [USER], "tools": [{"name": "f", "input_schema": DEEP}]}),
        ("/v1/responses", {"input": "x", "tools": [{"type": "function", "name": "f", "parameters": DEEP}]}),
        ("/v1/responses", {"input": "x", "text": {"later": DEEP}}),
        ("/v1/responses/input_tokens", {"input": "x", "reasoning": {"summary": DEEP}}),
    ],
)
async def test_what_is_nested_deeply_is_the_clients_fault(bench: MakeBench, path: str, fields: Any) -> None:
    async with bench() as b:
        answer = await b.http.post(path, json={"model": MODEL_NAME, **fields})
        assert answer.status_code == 400, answer.text
        assert "invalid_request_error" in answer.text
        assert not b.decode.started


async def test_deep_json_within_strings_reaches_the_template_as_text_and_grpc_refuses_it(bench: MakeBench) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": json.dumps(nested(90))}}
    deep = {"type": "function", "function": {"name": "f", "arguments": json.dumps(nested(900))}}
    async with bench(context=16_384) as b:
        for each in (call, deep):
            messages = [USER, {"role": "assistant", "tool_calls": [each]}, USER]
            answer = await b.http.post("/v1/chat/completions", json={"model": MODEL_NAME, "messages": messages})
            assert answer.status_code == 200, answer.text
        async with grpc.aio.insecure_channel(b.gateway.grpc_address) as channel:
            asked = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="x")], tools_json=[json.dumps(TOOL)])
            with pytest.raises(grpc.aio.AioRpcError, match="tools_json: JSON nested 302 levels deep") as caught:
                await anext(aiter(InferenceServiceStub(channel).Chat(asked)))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
