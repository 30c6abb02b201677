"""InferenceService: the same validator and the same path as REST."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tokenizers import AddedToken

from tests.services.gateway.conftest import (
    CONTEXT,
    END,
    MODEL_NAME,
    TEMPLATE,
    Bench,
    MakeBench,
    tiny_tokenizer,
    write_model,
)
from tests.services.gateway.fakes import LENGTH, STOP, SequenceDelta, Start, failing, forever, speaking
from tests.weft.rpc.bare_http2 import MAX_CONCURRENT_STREAMS, SETTINGS, BareClient
from weft.errors import DeadlineExceeded
from weft.metrics import REGISTRY
from weft_mesh.v1 import common_pb2
from weft_mesh.v1 import inference_service_pb2 as pb
from weft_mesh.v1.inference_service_pb2_grpc import InferenceServiceStub
from weft_services.gateway.front import grpc_service
from weft_services.gateway.front.asgi_io import MAX_BODY_BYTES
from weft_services.gateway.front.grpc_service import InferenceService, recorded
from weft_services.gateway.front.request_record import ApiEndpoint

USER = pb.ChatMessage(role="user", content="hi")


@asynccontextmanager
async def stub_of(b: Bench) -> AsyncIterator[Any]:
    """A client of the gateway's gRPC listener."""
    async with grpc.aio.insecure_channel(b.gateway.grpc_address) as channel:
        yield InferenceServiceStub(channel)


async def test_generate_streams_text_and_ends_with_usage(bench: MakeBench) -> None:
    async with bench() as b, stub_of(b) as stub:
        ids = b.ids("hello world")
        b.decode.script = speaking(ids, LENGTH, cached=1)
        options = pb.GenerationOptions(return_token_ids=True, num_logprobs=1, max_tokens=50, seed=3)
        answer = [r async for r in stub.Generate(pb.GenerateRequest(text="x y", options=options), timeout=10)]
        assert "".join(response.text for response in answer) == "hello world"
        assert [token for response in answer for token in response.token_ids] == ids
        assert sum(len(response.logprobs) for response in answer) == len(ids)
        assert answer[-1].finish_reason == LENGTH
        assert answer[-1].usage.completion_tokens == len(ids)
        assert answer[-1].usage.cached_tokens == 1
        assert (b.decode.started[0].sampling.seed, b.decode.started[0].sampling.max_tokens) == (3, 50)


async def test_a_number_that_is_none_is_refused_and_not_left_out(bench: MakeBench) -> None:
    async with bench() as b, stub_of(b) as stub:
        for options in (pb.GenerationOptions(temperature=float("nan")), pb.GenerationOptions(top_p=float("inf"))):
            with pytest.raises(grpc.aio.AioRpcError, match="expected a number") as caught:
                await anext(aiter(stub.Generate(pb.GenerateRequest(text="x", options=options), timeout=10)))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert not b.decode.started


async def test_a_session_in_the_metadata_is_the_one_of_the_header(bench: MakeBench) -> None:
    async with bench() as b, stub_of(b) as stub:
        await b.http.post("/v1/completions", json={"model": MODEL_NAME, "prompt": "x"}, headers={"session-id": "s"})
        request, metadata = pb.GenerateRequest(text="x"), (("session-id", "s"),)
        assert [response async for response in stub.Generate(request, timeout=10, metadata=metadata)]
        from_rest, from_grpc = (query.session for query in b.scheduler.routed)
        assert from_rest == from_grpc != b""


@pytest.mark.parametrize(
    "calls", ["", "{% if m.content is none %}[called]{% endif %}"], ids=["by their own", "by missing content"]
)
async def test_chat_renders_the_same_prompt_as_rest(bench: MakeBench, tmp_path: Path, calls: str) -> None:
    template = TEMPLATE.replace("{{ m.content", calls + "{{ m.content")
    assert calls in template
    async with bench(model=str(write_model(tmp_path, tiny_tokenizer(), template))) as b, stub_of(b) as stub:
        b.decode.script = speaking([*b.ids("hello"), END])
        tool = '{"type": "function", "function": {"name": "f"}}'
        calls = '[{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\\"a\\": 1}"}}]'
        request = pb.ChatRequest(
            model=MODEL_NAME,
            messages=[
                pb.ChatMessage(role="user", content="call"),
                pb.ChatMessage(role="assistant", tool_calls_json=calls),
                pb.ChatMessage(role="tool", content="2", tool_call_id="1"),
            ],
            tools_json=[tool],
        )
        answer = [response async for response in stub.Chat(request, timeout=10)]
        assert "".join(response.content for response in answer) == "hello"
        assert answer[-1].finish_reason == STOP
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
        await b.client.chat.completions.create(
            model=MODEL_NAME,
            messages=[
                {"role": "user", "content": "call"},
                {"role": "assistant", "tool_calls": [call]},  # type: ignore[list-item]
                {"role": "tool", "content": "2", "tool_call_id": "1"},
            ],
            tools=[{"type": "function", "function": {"name": "f"}}],
        )
        by_grpc, by_rest = b.decode.started
        assert by_grpc.token_ids == by_rest.token_ids
        assert by_grpc.sampling.temperature == by_rest.sampling.temperature


@pytest.mark.parametrize(
    ("request_", "code", "word"),
    [
        (pb.GenerateRequest(text="x", options=pb.GenerationOptions(max_tokens=0)), "INVALID_ARGUMENT", "max_tokens"),
        (pb.GenerateRequest(text="x", options=pb.GenerationOptions(top_p=2)), "INVALID_ARGUMENT", "top_p"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[10**6])), "INVALID_ARGUMENT", "prompt"),
        (pb.GenerateRequest(), "INVALID_ARGUMENT", "prompt"),
        (pb.GenerateRequest(model="other", text="x"), "NOT_FOUND", "other"),
        (pb.ChatRequest(), "INVALID_ARGUMENT", "messages"),
        (pb.ChatRequest(messages=[pb.ChatMessage(role="x")]), "INVALID_ARGUMENT", "messages.0.role"),
        (
            pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="x")], tools_json=["{"]),
            "INVALID_ARGUMENT",
            "tools_json",
        ),
    ],
)
async def test_bad_requests_name_the_field(bench: MakeBench, request_: Any, code: str, word: str) -> None:
    async with bench() as b, stub_of(b) as stub:
        call = stub.Chat if isinstance(request_, pb.ChatRequest) else stub.Generate
        with pytest.raises(grpc.aio.AioRpcError, match=word) as refusal:
            async for _ in call(request_, timeout=10):
                pass
        assert refusal.value.code().name == code
        trailing: Any = dict(refusal.value.trailing_metadata() or ())
        if code == "INVALID_ARGUMENT":
            status = status_pb2.Status.FromString(trailing["grpc-status-details-bin"])
            bad = error_details_pb2.BadRequest()
            assert status.details[0].Unpack(bad)
            assert word in bad.field_violations[0].field
            assert bad.field_violations[0].description == status.message == refusal.value.details()


async def test_a_lost_worker_is_unavailable_without_addresses(bench: MakeBench) -> None:
    async with bench(migration_timeout_seconds=0.1) as b, stub_of(b) as stub:
        b.decode.script = failing(14)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            async for _ in stub.Generate(pb.GenerateRequest(text="x"), timeout=10):
                pass
        assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "10.1.2.3" not in (refusal.value.details() or "")


async def test_a_caller_that_cancels_cancels_in_the_engine(bench: MakeBench) -> None:
    async with bench() as b, stub_of(b) as stub:
        b.decode.script = speaking(b.ids("hello"), finish=None)
        call = stub.Generate(pb.GenerateRequest(text="x"), timeout=10)
        await call.read()
        call.cancel()
        await b.decode.until(lambda: len(b.decode.cancelled) == 1)
        await b.scheduler.until(lambda: b.scheduler.stages()[-1:] == ["cancelled"])


async def test_models_and_health_are_told(bench: MakeBench) -> None:
    async with bench() as b, stub_of(b) as stub:
        models = await stub.ListModels(pb.ListModelsRequest(), timeout=10)
        assert [(card.id, card.max_context_tokens) for card in models.models] == [(MODEL_NAME, CONTEXT)]
        async with grpc.aio.insecure_channel(b.gateway.grpc_address) as channel:
            stub_of_health: Any = health_pb2_grpc.HealthStub(channel)
            watch = stub_of_health.Watch(health_pb2.HealthCheckRequest(), timeout=10)
            async for answer in watch:
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    break
            watch.cancel()


async def test_a_full_fleet_says_when_to_come_back(bench: MakeBench) -> None:
    async with bench() as b, stub_of(b) as stub:
        b.scheduler.refusal = (grpc.StatusCode.RESOURCE_EXHAUSTED, "full", (("weft-retry-after", "7.500"),))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await anext(aiter(stub.Generate(pb.GenerateRequest(text="x"), timeout=10)))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(refused.value.trailing_metadata())["weft-retry-after"] == "7.500"


async def test_a_client_that_does_not_read_holds_neither_a_place_nor_the_engine(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft_services.gateway.front.grpc_service.SLOW_READER_SECONDS", 0.2)

    async def talkative(start: Start) -> AsyncIterator[SequenceDelta]:
        while True:
            yield SequenceDelta(key=start.key, token_ids=[100] * 4096)

    async with bench(context=1 << 23) as b, stub_of(b) as stub:
        b.decode.script = talkative
        call = stub.Generate(
            pb.GenerateRequest(text="x", options=pb.GenerationOptions(return_token_ids=True, max_tokens=1 << 22))
        )
        await b.decode.until(lambda: len(b.decode.cancelled) == 1)
        assert b.gateway.pipeline.num_in_flight == 0
        call.cancel()


async def test_tools_and_formats_are_those_of_rest(bench: MakeBench) -> None:
    async with bench(tool_format="hermes") as b, stub_of(b) as stub:
        b.decode.script = speaking([*b.ids('Hm. <tool_call>{"name": "now", "arguments": {"a": 1}}</tool_call>'), END])
        request = pb.ChatRequest(
            messages=[pb.ChatMessage(role="user", content="hi")],
            tools_json=['{"type": "function", "function": {"name": "now"}}'],
        )
        responses = [response async for response in stub.Chat(request)]
        assert "".join(response.content for response in responses) == "Hm."
        calls = [call for response in responses for call in response.tool_calls]
        assert (calls[0].name, calls[0].index, bool(calls[0].id)) == ("now", 0, True)
        assert "".join(call.arguments for call in calls) == '{"a": 1}'
        assert responses[-1].finish_reason == common_pb2.FINISH_REASON_TOOL_CALLS
        request.tool_choice_json = '"required"'
        assert [response async for response in stub.Chat(request)]
        options = pb.GenerationOptions(structured_outputs_json='{"regex": "[0-9]+"}')
        assert [response async for response in stub.Generate(pb.GenerateRequest(text="x", options=options))]
        forced, formatted = (start.sampling.grammar.text for start in b.decode.started[1:])
        assert "tool_call" in forced
        assert "[0-9]+" in formatted


async def test_answers_side_by_side_are_told_apart_and_counted_once(bench: MakeBench) -> None:
    async with bench() as b, stub_of(b) as stub:
        b.decode.script = speaking(b.ids("hello world"), LENGTH)
        options = pb.GenerationOptions(n=2, seed=3, max_tokens=50, prompt_cache_retention="24h")
        for answer in (
            [r async for r in stub.Generate(pb.GenerateRequest(text="x y", options=options), timeout=10)],
            [r async for r in stub.Chat(pb.ChatRequest(messages=[USER], options=options), timeout=10)],
        ):
            for choice in (0, 1):
                own = [response for response in answer if response.choice == choice]
                said = [r.text if isinstance(r, pb.GenerateResponse) else r.content for r in own]
                assert "".join(said) == "hello world"
                assert [bool(response.finish_reason) for response in own] == [False] * (len(own) - 1) + [True]
            assert [response.HasField("usage") for response in answer] == [False] * (len(answer) - 1) + [True]
            assert answer[-1].usage.completion_tokens == 2 * len(b.ids("hello world"))
        assert {start.retention.idle_seconds for start in b.decode.started} == {86400}
        options.n = 17
        with pytest.raises(grpc.aio.AioRpcError, match="n:"):
            assert [r async for r in stub.Generate(pb.GenerateRequest(text="x", options=options), timeout=10)]


async def test_who_asks_for_the_timeline_has_it_behind_the_answer(bench: MakeBench) -> None:
    async with bench() as b, stub_of(b) as stub:
        b.decode.script = speaking(b.ids("hello world"), LENGTH)
        for wanted in ((("x-weft-timeline", "1"),), ()):
            call = stub.Chat(pb.ChatRequest(messages=[USER]), timeout=10, metadata=wanted)
            assert [response async for response in call]
            told = dict(await call.trailing_metadata()).get("x-weft-timeline")
            if not wanted:
                assert told is None
                continue
            assert told is not None
            at = json.loads(told)["elapsed_ms"]
            assert 0 < at["prepared"] <= at["routed"] <= at["first_token"] <= at["end"]


async def test_thoughts_are_counted_and_sent_back_as_in_rest(bench: MakeBench, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in ("<think>", "</think>")])
    template = "{% for m in messages %}<think>{{ m.reasoning_content }}</think>{{ m.content }}\n{% endfor %}answer: "
    model = str(write_model(tmp_path, tokenizer, template))
    async with bench(model=model) as b, stub_of(b) as stub:
        b.decode.script = speaking([*tokenizer.encode("<think>hello hello</think>world").ids, END])
        spoken = pb.ChatMessage(role="assistant", content="world", reasoning_content="hello")
        request = pb.ChatRequest(messages=[USER, spoken, USER])
        answer = [response async for response in stub.Chat(request, timeout=10)]
        assert "".join(response.reasoning_content for response in answer) == "hello hello"
        again = {"role": "assistant", "content": "world", "reasoning_content": "hello"}
        user = {"role": "user", "content": "hi"}
        body = {"model": MODEL_NAME, "messages": [user, again, user]}
        rest = (await b.http.post("/v1/chat/completions", json=body)).json()
        assert answer[-1].usage.reasoning_tokens == rest["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
        by_grpc, by_rest = b.decode.started
        assert by_grpc.token_ids == by_rest.token_ids


GENERATE = "/weft_mesh.v1.InferenceService/Generate"


@asynccontextmanager
async def channel_to(b: Bench) -> AsyncIterator[Any]:
    """To the public listener."""
    async with grpc.aio.insecure_channel(b.gateway.grpc_address) as channel:
        yield channel


async def unsaid() -> AsyncIterator[bytes]:
    """A request that is announced and never sent."""
    await forever()
    yield b""


async def code_of(call: Any) -> grpc.StatusCode:
    """How a call ends."""
    with pytest.raises(grpc.aio.AioRpcError) as refusal:
        async for _ in call:
            pass
    return refusal.value.code()


async def test_one_connection_has_no_more_than_so_many_calls_at_a_time(bench: MakeBench) -> None:
    async with bench() as b, BareClient(b.gateway.grpc_address, window=65535) as client:
        settings = dict(struct.iter_unpack(">HI", await client.first(SETTINGS)))
        assert settings[MAX_CONCURRENT_STREAMS] == 1024


async def test_a_message_larger_than_a_body_may_be_is_refused(bench: MakeBench) -> None:
    async with bench() as b, channel_to(b) as channel:
        request = pb.GenerateRequest(text="x" * (MAX_BODY_BYTES + 1))
        call = InferenceServiceStub(channel).Generate(request, timeout=10)
        assert await code_of(call) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert b.gateway.pipeline.num_in_flight == 0


async def test_a_call_has_its_place_before_its_message_is_read(bench: MakeBench) -> None:
    async with bench(max_requests=1) as b, channel_to(b) as channel:
        first = channel.stream_stream(GENERATE)(unsaid())
        while b.gateway.pipeline.num_in_flight == 0:  # noqa: ASYNC110 (no event to await)
            await asyncio.sleep(0.01)
        assert await code_of(channel.stream_stream(GENERATE)(unsaid())) is grpc.StatusCode.RESOURCE_EXHAUSTED
        response = await b.http.post("/v1/completions", json={"model": "tiny", "prompt": "x"})
        assert response.status_code == 429, "both listeners count together"
        first.cancel()
        while b.gateway.pipeline.num_in_flight:  # noqa: ASYNC110 (no event to await)
            await asyncio.sleep(0.01)


async def test_calls_that_are_refused_at_the_door_are_counted_as_requests_are(bench: MakeBench) -> None:
    def count(endpoint: str) -> float:
        labels = {"endpoint": endpoint, "outcome": "failed", "model": ""}
        return REGISTRY.get_sample_value("weft_requests_total", labels) or 0.0

    async with bench() as b, channel_to(b) as channel:
        b.gateway.pipeline.is_draining = True
        stub, before = InferenceServiceStub(channel), {name: count(name) for name in ApiEndpoint}
        for call in (stub.Generate(pb.GenerateRequest(text="x")), stub.Chat(pb.ChatRequest())):
            assert await code_of(call) is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Embed(pb.EmbedRequest())
        await b.http.post("/v1/completions", json={})
        counted = {name for name in ApiEndpoint if count(name) == before[name] + 1}
        assert counted == {"grpc.generate", "grpc.chat", "grpc.embed", "completions"}


async def test_a_message_that_does_not_come_gives_its_place_back(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench() as b, channel_to(b) as channel:
        with monkeypatch.context() as brief:
            brief.setattr(grpc_service, "BODY_SECONDS", 0.05)
            assert await code_of(channel.stream_stream(GENERATE)(unsaid())) is grpc.StatusCode.DEADLINE_EXCEEDED
        assert await code_of(channel.stream_stream(GENERATE)(iter(()))) is grpc.StatusCode.INVALID_ARGUMENT
        b.decode.script = speaking([*b.ids("hello"), END])
        stub = InferenceServiceStub(channel)
        answer = [response.text async for response in stub.Generate(pb.GenerateRequest(text="x"), timeout=10)]
        assert "".join(answer) == "hello"


async def test_a_message_that_was_taken_is_not_kept_by_the_stream_that_it_came_from() -> None:
    closed: list[bool] = []

    async def messages() -> AsyncIterator[bytes]:
        try:
            yield b"the one"
            yield b"another"
        finally:
            closed.append(True)

    assert await grpc_service._read_request(messages()) == b"the one"
    assert closed == [True]


class Expired:
    """What a handler knows of a call whose deadline passed before it was its turn."""

    def time_remaining(self) -> float:
        return 0.0

    def invocation_metadata(self) -> tuple[()]:
        return ()


async def test_a_deadline_that_has_just_passed_is_not_none(bench: MakeBench) -> None:
    async with bench() as b:
        b.decode.script = speaking([END])
        service = InferenceService(b.gateway.pipeline, timeout_seconds=20)
        with recorded("Generate", ()), pytest.raises(DeadlineExceeded):
            await service.Generate(pb.GenerateRequest(text="x").SerializeToString(), Expired())
        assert not b.scheduler.routed
