"""The public gRPC listener before a request is parsed: authentication, admission, limits."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from tests.services.gateway.conftest import END, Bench, MakeBench
from tests.services.gateway.fakes import forever, speaking
from tests.weft.rpc.bare_http2 import MAX_CONCURRENT_STREAMS, SETTINGS, BareClient
from weft.errors import DeadlineExceeded
from weft.metrics import REGISTRY
from weft_mesh.v1 import inference_service_pb2 as pb
from weft_mesh.v1.inference_service_pb2_grpc import InferenceServiceStub
from weft_services.gateway.front import grpc_service
from weft_services.gateway.front.asgi_io import MAX_BODY_BYTES
from weft_services.gateway.front.grpc_service import InferenceService, recorded
from weft_services.gateway.front.request_record import ApiEndpoint

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
        while b.gateway.pipeline.num_in_flight == 0:  # noqa: ASYNC110 (nobody tells)
            await asyncio.sleep(0.01)
        assert await code_of(channel.stream_stream(GENERATE)(unsaid())) is grpc.StatusCode.RESOURCE_EXHAUSTED
        response = await b.http.post("/v1/completions", json={"model": "tiny", "prompt": "x"})
        assert response.status_code == 429, "both listeners count together"
        first.cancel()
        while b.gateway.pipeline.num_in_flight:  # noqa: ASYNC110 (nobody tells)
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
