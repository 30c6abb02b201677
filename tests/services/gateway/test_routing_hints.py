"""Session headers: which one counts, and what becomes of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.services.gateway.conftest import MODEL_NAME, MakeBench
from tests.services.gateway.test_grpc import channel_to
from weft.api_keys import ApiKey, digest_of, dump_keys, make_secret
from weft_mesh.v1 import inference_service_pb2 as pb
from weft_mesh.v1.inference_service_pb2_grpc import InferenceServiceStub
from weft_services.gateway.mesh.routing_hints import PARENT_HEADERS, SESSION_HEADERS, ClientHints, read_client_hints


@pytest.mark.parametrize("position", range(len(SESSION_HEADERS)))
def test_every_header_counts_before_those_after_it_and_before_the_body(position: int) -> None:
    headers = [(name.encode(), name.encode()) for name in reversed(SESSION_HEADERS[position:])]
    assert read_client_hints(headers).hint == SESSION_HEADERS[position]
    assert read_client_hints(headers).digest("of the body") == ClientHints(hint=SESSION_HEADERS[position]).digest("")


def test_a_header_that_cannot_be_used_is_passed_over() -> None:
    headers = [("x-session-affinity", "x" * 257), ("x-session-id", ""), ("session-id", "s")]
    assert read_client_hints(headers).hint == "s"


@pytest.mark.parametrize("name", PARENT_HEADERS)
def test_a_session_that_another_was_started_from_counts_where_none_is_named(name: str) -> None:
    parent = ClientHints(hint="main").digest("")
    assert read_client_hints([(name, "main")]).digest("") == parent
    assert read_client_hints([(name, "main")]).digest("own") == ClientHints(hint="own").digest("")
    assert read_client_hints([(name, "main"), ("x-session-id", "own")]).digest("") == ClientHints(hint="own").digest("")


def test_without_a_session_there_is_no_digest() -> None:
    assert ClientHints().digest("") == b""
    assert ClientHints("tenant").digest("x" * 257) == b""


def test_a_digest_says_nothing_and_differs_by_tenant() -> None:
    digests = {ClientHints(tenant, "session").digest("") for tenant in ("", "a", "b")}
    assert len(digests) == 3
    assert all(len(digest) == 16 and b"session" not in digest for digest in digests)


def test_a_tenant_is_whoever_shows_the_same_key() -> None:
    assert read_client_hints([("authorization", "Bearer a"), ("x-api-key", "b")]).tenant == "Bearer a"
    assert read_client_hints([("x-api-key", "b")]).tenant == "b"


@pytest.mark.parametrize(
    "name", ["x-data-parallel-rank", "x-smg-target-worker", "x-prefiller-host-port", "x-tenant-id"]
)
def test_headers_that_name_workers_or_tenants_are_not_read(name: str) -> None:
    assert read_client_hints([(name, "decode-0")]) == ClientHints()


async def test_a_request_that_is_refused_for_what_it_says_of_itself_counts_as_one(
    bench: MakeBench, tmp_path: Path
) -> None:
    secret = make_secret()
    (tmp_path / "keys.json").write_text(dump_keys([ApiKey("alice", digest_of(secret), requests_per_minute=6)]))
    body = {"model": MODEL_NAME, "prompt": "x", "input": "x"}
    said = (("x-api-key", secret), ("x-vllm-priority", "soon"))
    left = [6]
    async with bench(keys=str(tmp_path / "keys.json")) as b, channel_to(b) as channel:
        for path in ("/v1/completions", "/v1/embeddings", "/v1/responses/input_tokens"):
            answer = await b.http.post(path, json=body, headers=dict(said))
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-vllm-priority")
            left.append(int(answer.headers["x-ratelimit-remaining-requests"]))
        stub: Any = InferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="x-vllm-priority"):
            await stub.Generate(pb.GenerateRequest(text="x"), metadata=said).read()
        answer = await b.http.post("/v1/completions", json={}, headers={"x-api-key": secret})
        left.append(int(answer.headers["x-ratelimit-remaining-requests"]))
    assert left == [6, 5, 4, 3, 1]
