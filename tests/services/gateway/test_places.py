"""Places in flight: no request holds one without need, and no tenant holds all."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from tests.services.gateway.conftest import MODEL_NAME, Bench, MakeBench
from tests.services.gateway.fakes import speaking
from tests.services.gateway.test_connections import connect
from tests.services.gateway.test_grpc import GENERATE, channel_to, code_of, unsaid
from weft.api_keys import ApiKey, digest_of, dump_keys, make_secret
from weft_services.gateway.front import asgi_io, grpc_service
from weft_services.gateway.front.asgi_io import MAX_BODY_BYTES

SECRETS = {name: make_secret() for name in ("alice", "alan", "bob", "ops")}
PATHS = ["/v1/chat/completions", "/v1/embeddings", "/tokenize", "/v1/messages/count_tokens"]
ASKED: dict[str, Any] = {"model": MODEL_NAME, "prompt": "x", "stream": True}


def keys_file(path: Path, *entries: ApiKey) -> str:
    (path / "keys.json").write_text(dump_keys(entries))
    return str(path / "keys.json")


def entry(name: str, **fields: Any) -> ApiKey:
    return ApiKey(name, digest_of(SECRETS[name]), **fields)


def shown(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {SECRETS[name]}"}


async def stalled(b: Bench, path: str) -> int:
    """A body that is announced and never sent; its status."""
    reader, writer = await connect(b)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 9\r\n"
    writer.write(f"{head}x-api-key: {SECRETS['alice']}\r\n\r\n".encode())
    status = int((await reader.readline()).split()[1])
    writer.close()
    return status


@pytest.mark.parametrize("path", PATHS)
async def test_bodies_that_do_not_come_count_as_requests(
    bench: MakeBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(asgi_io, "BODY_SECONDS", 0.02)
    async with bench(keys=keys_file(tmp_path, entry("alice", requests_per_minute=1))) as b:
        assert [await stalled(b, path) for _ in range(2)] == [408, 429]


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [(b"{}", "text/plain", 415), (b"x" * (MAX_BODY_BYTES + 1), "application/json", 413)],
    ids=["of another type", "too large"],
)
async def test_bodies_that_are_not_read_count_as_requests(
    bench: MakeBench, tmp_path: Path, content: bytes, kind: str, status: int
) -> None:
    async with bench(keys=keys_file(tmp_path, entry("alice", requests_per_minute=1))) as b:
        asked: Any = {"content": content, "headers": {**shown("alice"), "content-type": kind}}
        answers = [(await b.http.post(PATHS[0], **asked)).status_code for _ in range(2)]
        assert answers == [status, 429]


async def test_messages_that_do_not_come_count_as_requests(
    bench: MakeBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_service, "BODY_SECONDS", 0.02)
    async with bench(keys=keys_file(tmp_path, entry("alice", requests_per_minute=1))) as b, channel_to(b) as channel:
        call = channel.stream_stream(GENERATE)(unsaid(), metadata=list(shown("alice").items()))
        assert await code_of(call) is grpc.StatusCode.DEADLINE_EXCEEDED
        call = channel.stream_stream(GENERATE)(unsaid(), metadata=list(shown("alice").items()))
        assert await code_of(call) is grpc.StatusCode.RESOURCE_EXHAUSTED


class Streams:
    """Answers that do not end."""

    def __init__(self, b: Bench, stack: AsyncExitStack) -> None:
        self.b, self._stack = b, stack
        b.decode.script = speaking(b.ids("hello"), finish=None)

    async def begin(self, name: str) -> int:
        """One more; its status."""
        stream = self.b.http.stream("POST", "/v1/completions", json=ASKED, headers=shown(name))
        response: httpx.Response = await self._stack.enter_async_context(stream)
        return response.status_code


async def test_a_tenant_leaves_half_of_what_others_leave(bench: MakeBench, tmp_path: Path) -> None:
    keys = keys_file(tmp_path, entry("alice", tenant="acme"), entry("alan", tenant="acme"), entry("bob"))
    async with bench(max_requests=8, keys=keys) as b, AsyncExitStack() as stack, asyncio.timeout(20):
        streams = Streams(b, stack)
        names = ["alice", "alan", "alice", "alan", "alice"]
        assert [await streams.begin(name) for name in names] == [200, 200, 200, 200, 429]
        assert [await streams.begin("bob") for _ in range(3)] == [200, 200, 429]
        assert b.gateway.pipeline.num_in_flight == 6


@pytest.mark.parametrize("others", [(), (entry("ops", operator=True),)], ids=["alone", "with an operator"])
async def test_a_tenant_without_others_has_all_places(bench: MakeBench, tmp_path: Path, others: tuple[ApiKey]) -> None:
    keys = keys_file(tmp_path, entry("alice", tenant="acme"), entry("alan", tenant="acme"), *others)
    async with bench(max_requests=3, keys=keys) as b, AsyncExitStack() as stack, asyncio.timeout(20):
        streams = Streams(b, stack)
        assert [await streams.begin(name) for name in ("alice", "alan", "alice", "alan")] == [200, 200, 200, 429]


async def test_where_there_is_one_place_each_tenant_may_have_it(bench: MakeBench, tmp_path: Path) -> None:
    async with bench(max_requests=1, keys=keys_file(tmp_path, entry("alice"), entry("bob"))) as b:
        for name in ("alice", "bob"):
            assert (await b.http.post("/tokenize", json={"prompt": "x"}, headers=shown(name))).status_code == 200
