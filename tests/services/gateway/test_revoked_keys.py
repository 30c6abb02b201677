"""A revoked or restricted key ends its requests, including those that are already running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.services.gateway.conftest import MODEL_NAME, Bench, MakeBench
from tests.services.gateway.fakes import speaking
from tests.services.gateway.test_grpc import code_of
from tests.services.gateway.test_page import events
from weft.api_keys import ApiKey, digest_of, dump_keys, make_secret
from weft_mesh.v1 import inference_service_pb2 as pb
from weft_mesh.v1.inference_service_pb2_grpc import InferenceServiceStub

SECRET = make_secret()
OPS, OTHER = ApiKey("ops", digest_of(SECRET), operator=True), ApiKey("other", digest_of(make_secret()))
SHOWN = {"x-api-key": SECRET}
USER = {"role": "user", "content": "hi"}
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [USER], "max_tokens": 9},
}
# the Responses API has no word for it
WORDS = {"/v1/messages": "authentication_error", "/v1/responses": "response.failed"}


class Keys:
    """A keys file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.write([OPS, OTHER])

    def write(self, keys: Sequence[ApiKey]) -> None:
        self.path.write_text(dump_keys(keys))


@asynccontextmanager
async def saying_hello(bench: MakeBench, keys: Keys) -> AsyncIterator[Bench]:
    """Answers begin, and do not end by themselves."""
    async with bench(keys=str(keys.path)) as b, asyncio.timeout(20):
        b.decode.script = speaking(b.ids("hello world"), finish=None)
        yield b
        await b.decode.until(lambda: len(b.decode.cancelled) == len(b.decode.started) > 0)


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys.json")


@pytest.mark.parametrize("left", [[OTHER], [OTHER, ApiKey("ops", OPS.digest)]], ids=["revoked", "no operator any more"])
async def test_the_fleets_events_end_with_the_key_that_they_are_told_to(
    bench: MakeBench, keys: Keys, left: list[ApiKey]
) -> None:
    async with bench(keys=str(keys.path)) as b:
        asked = b.http.stream("GET", "/weft/fleet/events", headers=SHOWN)
        async with asked as response, asyncio.timeout(20):
            told = events(response)
            assert [(await anext(told))[0] for _ in range(3)] == ["hello", "fleet", "fleet"]
            keys.write(left)
            while (event := await anext(told, None)) is not None and event[0] == "fleet":
                pass
            assert event is not None
            assert (event[0], event[1]["code"]) == ("error", "invalid_api_key")
            assert await anext(told, None) is None


@pytest.mark.parametrize("path", STREAMS)
async def test_a_stream_ends_with_an_error_when_its_key_is_revoked(bench: MakeBench, keys: Keys, path: str) -> None:
    async with saying_hello(bench, keys) as b:
        body = {"model": MODEL_NAME, "stream": True, **STREAMS[path]}
        async with b.http.stream("POST", path, json=body, headers=SHOWN) as response:
            told = ""
            async for text in response.aiter_text():
                if not told:
                    keys.write([OTHER])
                told += text
        assert response.status_code == 200
        errors = [line for line in told.splitlines() if line.startswith("data:") and "was revoked" in line]
        assert len(errors) == 1
        assert WORDS.get(path, "invalid_api_key") in errors[0]
        assert b.gateway.pipeline.num_in_flight == 0


async def test_what_has_not_begun_is_refused_when_its_key_is_revoked(bench: MakeBench, keys: Keys) -> None:
    async with saying_hello(bench, keys) as b, asyncio.TaskGroup() as group:
        body = {"model": MODEL_NAME, "messages": [USER]}
        asked = group.create_task(b.http.post("/v1/chat/completions", json=body, headers=SHOWN))
        await b.decode.until(lambda: len(b.decode.started) == 1)
        keys.write([OTHER])
        assert (await asked).status_code == 401
        assert asked.result().json()["error"]["code"] == "invalid_api_key"


async def test_a_call_ends_when_its_key_is_revoked(bench: MakeBench, keys: Keys) -> None:
    async with saying_hello(bench, keys) as b, grpc.aio.insecure_channel(b.gateway.grpc_address) as channel:
        stub: Any = InferenceServiceStub(channel)
        request = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="hi")])
        call = stub.Chat(request, metadata=[*SHOWN.items()])
        assert (await anext(aiter(call))).content
        keys.write([OTHER])
        assert await code_of(call) is grpc.StatusCode.UNAUTHENTICATED
        assert "was revoked" in await call.details()


async def test_a_key_that_may_do_less_lets_what_it_asked_for_go_on(bench: MakeBench, keys: Keys) -> None:
    async with saying_hello(bench, keys) as b:
        body = {"model": MODEL_NAME, "prompt": "x", "stream": True}
        async with b.http.stream("POST", "/v1/completions", json=body, headers=SHOWN) as response:
            await b.decode.until(lambda: len(b.decode.started) == 1)
            keys.write([OTHER, ApiKey("ops", OPS.digest, requests_per_minute=1)])
            while (await b.http.get("/weft/fleet/events", headers=SHOWN)).status_code == 200:
                pass
            assert b.gateway.pipeline.num_in_flight == 1
            keys.write([OTHER])
            assert "was revoked" in (await response.aread()).decode()
