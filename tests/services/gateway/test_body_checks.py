"""Value counts in raw JSON and protobuf equal the parsers' own; limits on nesting."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import orjson
import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from tests.services.gateway.conftest import MODEL_NAME, Bench, MakeBench
from weft.errors import InvalidRequest
from weft_mesh.v1 import inference_service_pb2 as pb
from weft_mesh.v1.inference_service_pb2_grpc import InferenceServiceStub
from weft_services.gateway.dialects import body_checks
from weft_services.gateway.dialects.anthropic_requests import parse_count, parse_messages
from weft_services.gateway.dialects.body_checks import MAX_FIELDS, MAX_OBJECTS, check_body, check_message
from weft_services.gateway.dialects.openai_requests import parse_chat, parse_completion
from weft_services.gateway.dialects.responses_requests import parse_responses
from weft_services.gateway.dialects.token_requests import parse_tokenize
from weft_services.gateway.front import grpc_requests

TRICKY = st.text('{["\\}]x', max_size=6)
VALUES = st.recursive(
    st.one_of(st.none(), st.integers(-9, 9), TRICKY),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TRICKY, inner, max_size=4),
    max_leaves=25,
)


def count_values(value: Any) -> dict[str, int]:
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
    counts = count_values(value)
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


SERVICE = "/weft_mesh.v1.InferenceService"
TEXT = st.text("ab\0", max_size=3)
IDS = st.lists(st.sampled_from([0, 127, 128, 2**32 - 1]), max_size=4)
OPTIONS = st.builds(
    pb.GenerationOptions,
    max_tokens=st.integers(0, 300),
    temperature=st.floats(0, 2, width=32),
    stop=st.lists(TEXT, max_size=3),
    stop_token_ids=IDS,
    logit_bias=st.dictionaries(st.integers(0, 200), st.just(1.5), max_size=3),
)
MESSAGES = st.builds(pb.ChatMessage, role=TEXT, content=TEXT)
CHATS = st.builds(
    pb.ChatRequest, model=TEXT, messages=st.lists(MESSAGES, max_size=4), tools_json=st.lists(TEXT), options=OPTIONS
)
REQUESTS: st.SearchStrategy[Message] = st.one_of(
    CHATS,
    st.builds(pb.TokenizeRequest, model=TEXT, chat=CHATS, add_special_tokens=st.booleans()),
    st.builds(pb.GenerateRequest, token_ids=st.builds(pb.TokenIds, ids=IDS), options=OPTIONS),
    st.builds(pb.DetokenizeRequest, token_ids=IDS),
)


def count_fields(message: Message) -> int:
    """Number of fields, a packed list being one; an entry of a map is a message with a key and a value."""
    fields = 0
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            fields += 3 * len(value)
        elif field.message_type is not None:
            fields += sum(1 + count_fields(each) for each in (value if field.is_repeated else [value]))
        else:
            fields += len(value) if field.is_repeated and field.type != field.TYPE_UINT32 else 1
    return fields


@given(request_=REQUESTS, max_fields=st.integers(0, 12))
def test_message_is_rejected_when_it_has_too_many_fields(request_: Message, max_fields: int) -> None:
    raw = request_.SerializeToString()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_checks, "MAX_FIELDS", max_fields)
        if len(raw) // 2 > max_fields and count_fields(request_) > max_fields:
            with pytest.raises(InvalidRequest, match="more than"):
                check_message(raw, type(request_))
        else:
            assert count_fields(request_) <= max_fields
            check_message(raw, type(request_))


@given(st.binary(min_size=4, max_size=40), st.integers(0, 40))
def test_bytes_that_are_no_message_pass_or_are_rejected(noise: bytes, cut: int) -> None:
    whole = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="x" * 20)] * 3).SerializeToString()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body_checks, "MAX_FIELDS", 1)
        for raw in (noise, whole[:cut] + noise):
            with suppress(InvalidRequest):
                check_message(raw, pb.ChatRequest)


@asynccontextmanager
async def channel_to(b: Bench) -> AsyncIterator[Any]:
    """For calls whose messages are bytes."""
    async with grpc.aio.insecure_channel(b.gateway.grpc_address) as channel:
        yield channel


EMPTY = b"\x12\x00" * (MAX_FIELDS + 1)


@pytest.mark.parametrize(
    ("method", "raw"),
    [
        ("Chat", EMPTY),
        ("Chat", pb.ChatRequest(options=pb.GenerationOptions(stop=[""] * (MAX_FIELDS + 1))).SerializeToString()),
        ("Generate", b"\x22\x00" * (MAX_FIELDS + 1)),
        ("Embed", EMPTY),
        ("Tokenize", pb.TokenizeRequest(chat=pb.ChatRequest.FromString(EMPTY)).SerializeToString()),
        ("Detokenize", b"\x10\x01" * (MAX_FIELDS + 1)),
    ],
    ids=["messages", "stops", "options", "inputs", "chat", "unpacked"],
)
async def test_message_with_too_many_fields_is_rejected_unparsed(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch, method: str, raw: bytes
) -> None:
    async with bench() as b, channel_to(b) as channel:
        call = channel.unary_stream(f"{SERVICE}/{method}")(raw, timeout=10)
        with pytest.raises(grpc.aio.AioRpcError, match=f"more than {MAX_FIELDS} fields") as refusal:
            async for _ in call:
                pass
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        broken = channel.unary_stream(f"{SERVICE}/{method}")(b"\x12\xff", timeout=10)
        with pytest.raises(grpc.aio.AioRpcError, match="the message is not a valid") as refusal:
            async for _ in broken:
                pass
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_long_message_is_read_in_a_thread(bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def watched(raw: bytes, kind: Any) -> None:
        seen.append(threading.current_thread().name)
        check_message(raw, kind)

    monkeypatch.setattr(grpc_requests, "check_message", watched)
    chat = pb.ChatRequest(model=MODEL_NAME, messages=[pb.ChatMessage(role="user", content="x " * 2000)])
    requests = {
        "Chat": chat,
        "Generate": pb.GenerateRequest(text="x " * 2000),
        "Embed": pb.EmbedRequest(inputs=[pb.EmbedInput(text="x " * 2000)]),
        "Tokenize": pb.TokenizeRequest(chat=chat),
        "Detokenize": pb.DetokenizeRequest(token_ids=[5] * 4000),
    }
    async with bench() as b, channel_to(b) as channel:
        for method, request in requests.items():
            call = channel.unary_stream(f"{SERVICE}/{method}")(request.SerializeToString(), timeout=10)
            with suppress(grpc.aio.AioRpcError):  # it is longer than the context
                async for _ in call:
                    pass
    assert len(seen) == len(requests)
    assert all(name.startswith("text") for name in seen)


async def test_json_in_a_message_is_counted_before_it_is_read(bench: MakeBench) -> None:
    half = "[" + ",".join(["{}"] * (MAX_FIELDS // 2 + 1)) + "]"
    called = pb.ChatMessage(role="assistant", tool_calls_json=half)
    formats = pb.GenerationOptions(response_format_json=half, structured_outputs_json=half)
    async with bench() as b, channel_to(b) as channel:
        for request in (
            pb.ChatRequest(tools_json=[half, half]),
            pb.ChatRequest(messages=[called], tool_choice_json=half),
            pb.ChatRequest(options=formats),
        ):
            call = channel.unary_stream(f"{SERVICE}/Chat")(request.SerializeToString(), timeout=10)
            with pytest.raises(grpc.aio.AioRpcError, match="the body has 65538 objects"):
                async for _ in call:
                    pass
