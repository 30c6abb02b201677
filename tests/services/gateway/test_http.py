"""The HTTP edge: routes, statuses, limits, headers."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import os
import re
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest

from tests.services.gateway.conftest import CONTEXT, END, MODEL_NAME, MakeBench
from tests.services.gateway.fakes import LENGTH, SequenceDelta, failing, speaking
from tests.services.gateway.test_connections import connect
from tests.services.gateway.test_keys import bearer, entry, keys
from weft.errors import ConfigError
from weft.metrics import REGISTRY
from weft_mesh.v1.scheduler_service_pb2 import WorkerReport
from weft_services.gateway.config import GatewayConfig
from weft_services.gateway.front import grpc_service, http_server, request_record
from weft_services.gateway.front.app import APIS
from weft_services.gateway.front.asgi_io import MAX_BODY_BYTES
from weft_services.gateway.front.http_server import MAX_HEAD_BYTES, MAX_HEADERS
from weft_services.gateway.front.local_endpoints import ModelCards
from weft_services.gateway.front.request_record import ApiEndpoint, init_series

JSON = {"content-type": "application/json"}


async def test_the_model_is_listed_and_described(bench: MakeBench) -> None:
    async with bench() as b:
        models = await b.client.models.list()
        assert [model.id for model in models.data] == [MODEL_NAME]
        model = await b.client.models.retrieve(MODEL_NAME)
        assert model.to_dict()["max_model_len"] == CONTEXT
        with pytest.raises(openai.NotFoundError) as refusal:
            await b.client.models.retrieve("other")
        assert refusal.value.code == "model_not_found"


async def test_an_unknown_model_is_a_404_that_names_it(bench: MakeBench) -> None:
    async with bench() as b:
        status, error = await b.refused("/v1/completions", model="other", prompt="x")
        assert (status, error["param"], error["code"]) == (404, "model", "model_not_found")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/chat/completions", 405),
        ("GET", "/v1/chat/completions/", 405),
        ("DELETE", "/v1/models", 405),
    ],
)
async def test_wrong_routes_and_methods_have_openais_error_body(
    bench: MakeBench, method: str, path: str, status: int
) -> None:
    async with bench() as b:
        response = await b.http.request(method, path)
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"{", JSON, 400),
        (b"{}", {"content-type": "text/plain"}, 415),
        (b"{}", {}, 415),
        (gzip.compress(b"{}"), JSON | {"content-encoding": "gzip"}, 415),
        (b"{}", JSON | {"content-encoding": "UTF-8"}, 400),
        (b"x" * (MAX_BODY_BYTES + 1), JSON, 413),
    ],
    ids=["broken", "plain text", "no type", "compressed", "charset for encoding", "too large"],
)
async def test_bodies_that_cannot_be_read_are_refused(
    bench: MakeBench, content: bytes, headers: dict[str, str], status: int
) -> None:
    async with bench() as b:
        response = await b.http.post("/v1/chat/completions", content=content, headers=headers)
        assert response.status_code == status
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert b.gateway.pipeline.num_in_flight == 0


def chat_body(content: bytes, more: bytes = b"") -> bytes:
    return b'{"model":"%b","messages":[{"role":"user","content":%b}]%b}' % (MODEL_NAME.encode(), content, more)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"model":"tiny","messages":[%b]}' % (b"{}," * 10**6)[:-1], "1000001 objects or lists"),
        (chat_body(b"[%b]" % (b"{}," * 10**6)[:-1]), "objects or lists"),
        (chat_body(b'""', b',"stop":[%b]' % (b'"x",' * 10**6)[:-1]), "strings"),
        (chat_body(b'"%b"' % (b"x" * 7_000_000)), "context length"),
        (chat_body(b"[" * 60_000), "JSON"),
        (chat_body(b'"\xff\xfe"'), "JSON"),
        (chat_body(rb'"\ud800"'), "JSON"),
        (chat_body(b'""', b',"max_tokens":' + b"9" * 10_000), "JSON"),
        (b"\0" * 4096, "JSON"),
    ],
    ids=["messages", "parts", "strings", "a long text", "depth", "UTF-8", "a surrogate", "digits", "zeros"],
)
async def test_bodies_that_are_hostile_get_a_400_that_says_why(bench: MakeBench, body: bytes, says: str) -> None:
    async with bench() as b:
        response = await b.http.post("/v1/chat/completions", content=body, headers=JSON)
        assert response.status_code == 400
        assert says in response.json()["error"]["message"]
        assert (await b.http.get("/health")).status_code == 200


async def test_a_body_without_a_length_is_bounded_too(bench: MakeBench) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(MAX_BODY_BYTES // 65536 + 2):
            yield b"x" * 65536

    async with bench() as b:
        response = await b.http.post("/v1/completions", content=pieces(), headers=JSON)
        assert response.status_code == 413
        assert (await b.http.get("/health")).status_code == 200


@pytest.mark.parametrize("given", ["abc-1.2_3", "no spaces", "", "x" * 129])
async def test_a_request_id_is_echoed_when_it_is_harmless_and_never_used_inside(bench: MakeBench, given: str) -> None:
    async with bench() as b:
        body = {"model": MODEL_NAME, "prompt": "x"}
        response = await b.http.post("/v1/completions", json=body, headers={"x-request-id": given})
        echoed = response.headers["x-request-id"]
        assert (echoed == given) == (given == "abc-1.2_3")
        assert len(echoed) <= 128
        assert b.decode.started[0].key.request_id != echoed


async def test_health_is_about_the_process_and_ready_about_the_fleet(bench: MakeBench) -> None:
    async with bench() as b:
        assert (await b.http.get("/health")).status_code == 200
        assert (await b.http.get("/ready")).json() == {"ready": True, "reasons": []}
        b.scheduler.is_prefill_ready = False
        await b.gateway.watch.poll()
        response = await b.http.get("/ready")
        assert (response.status_code, response.json()["reasons"]) == (503, ["no prefill worker is ready"])
        b.scheduler.decoders.clear()
        await b.gateway.watch.poll()
        assert "no decode worker has joined" in (await b.http.get("/ready")).json()["reasons"]
        await b.scheduler.kill()
        await b.gateway.watch.poll()
        assert (await b.http.get("/ready")).json()["reasons"] == ["the scheduler cannot be reached"]
        assert (await b.http.get("/health")).status_code == 200


async def test_a_gateway_whose_workers_are_full_is_ready(bench: MakeBench) -> None:
    async with bench() as b:
        b.scheduler.is_prefill_ready = False
        b.scheduler.reports["prefill-0"] = WorkerReport(full=True)
        await b.gateway.watch.poll()
        response = await b.http.get("/ready")
        assert (response.status_code, response.json()["reasons"]) == (200, [])


async def test_metrics_count_what_was_served(bench: MakeBench) -> None:
    async with bench() as b:
        b.decode.script = speaking(b.ids("hello"), cached=1)
        await b.client.completions.create(model=MODEL_NAME, prompt="x")
        text = (await b.http.get("/metrics")).text
        assert 'weft_requests_total{endpoint="completions",model="tiny",outcome="finished"}' in text
        assert "weft_requests_in_flight 0.0" in text


def test_failures_are_counted_from_the_start_so_that_the_first_shows_in_a_rate() -> None:
    """Of every endpoint that opens accounts, and where the model is not clear."""
    init_series(["just-served"])
    told = set(ApiEndpoint)
    assert {api.name for api in APIS.values()} | set(grpc_service.ENDPOINTS.values()) <= told
    sources = (path.read_text() for path in Path(request_record.__file__).parent.glob("*.py"))
    assert not [name for text in sources for name in re.findall(r'RequestRecord\("([^"]+)"', text)]
    for endpoint in ApiEndpoint:
        for model in ("", "just-served"):
            labels = {"endpoint": endpoint, "outcome": "failed", "model": model}
            assert REGISTRY.get_sample_value("weft_requests_total", labels) is not None


async def test_durations_are_of_requests_that_finished(bench: MakeBench) -> None:
    def count() -> float:
        return REGISTRY.get_sample_value("weft_request_duration_seconds_count", {"model": MODEL_NAME}) or 0.0

    async with bench() as b:
        before = count()
        for prompt, expected in (("x", 1), ("", 1), ("x", 2)):
            await b.http.post("/v1/completions", json={"model": MODEL_NAME, "prompt": prompt})
            assert count() - before == expected


async def test_prompts_that_no_worker_took_are_not_counted(bench: MakeBench) -> None:
    def count() -> float:
        return REGISTRY.get_sample_value("weft_prompt_tokens_total", {"model": MODEL_NAME}) or 0.0

    async with bench() as b:
        before = count()
        b.decode.script = failing(8)
        refused = await b.http.post("/v1/completions", json={"model": MODEL_NAME, "prompt": "hello"})
        assert (refused.status_code, count()) == (429, before)
        b.decode.script = speaking(b.ids("hello"))
        await b.http.post("/v1/completions", json={"model": MODEL_NAME, "prompt": "hello"})
        assert count() - before == len(b.decode.started[-1].token_ids)


async def test_more_requests_than_allowed_are_turned_away(bench: MakeBench) -> None:
    async with bench(max_requests=1) as b:
        b.decode.script = speaking(b.ids("hello"), finish=None)
        body = {"model": MODEL_NAME, "prompt": "x", "stream": True}
        async with b.http.stream("POST", "/v1/completions", json=body):
            response = await b.http.post("/v1/completions", json=body)
            assert response.status_code == 429
            assert response.headers["retry-after"] == "1"


def accepted_sockets(address: str) -> list[socket.socket]:
    """Duplicates of this process's ends of connections to a listener of its own."""
    port, found = int(address.rpartition(":")[2]), []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                continue
            sock = socket.socket(fileno=os.dup(int(number)))
            is_ours = sock.family in (socket.AF_INET, socket.AF_INET6) and sock.getsockname()[1] == port
            if is_ours and not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.append(sock)
            else:
                sock.close()
    return found


@pytest.mark.parametrize("face", ["http", "grpc"])
async def test_answers_are_sent_without_nagles_delay(bench: MakeBench, face: str) -> None:
    async with bench() as b, grpc.aio.insecure_channel(b.gateway.grpc_address) as channel:
        await b.http.get("/health")
        await channel.channel_ready()
        sockets = accepted_sockets(b.gateway.http_address if face == "http" else b.gateway.grpc_address)
        assert sockets
        for sock in sockets:
            with sock:
                assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


@pytest.mark.parametrize(
    "head",
    [
        b"".join(b"h%d: x\r\n" % i for i in range(MAX_HEADERS + 1)),
        b"h: " + b"x" * (MAX_HEAD_BYTES + 300_000),
    ],
    ids=["too many", "too long"],
)
async def test_a_head_without_measure_is_refused(bench: MakeBench, head: bytes) -> None:
    async with bench() as b:
        reader, writer = await connect(b)
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n" + head)
        assert b"400" in await reader.readline()
        writer.close()


async def test_a_connection_that_says_nothing_is_closed(bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.05)
    async with bench() as b:
        reader, writer = await connect(b)
        async with asyncio.timeout(10):
            assert await reader.read() == b""
        writer.close()


async def test_head_is_read_when_gateway_stood_still(bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 1.0)
    monkeypatch.setattr(http_server, "LATE_SECONDS", 0.05)
    async with bench() as b:
        reader, writer = await connect(b)
        await asyncio.sleep(0.05)  # it has been accepted
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        time.sleep(1.3)  # noqa: ASYNC251 - the gateway's loop, which is this one, stands still
        async with asyncio.timeout(10):
            assert b"200" in await reader.readline()
        writer.close()


async def test_a_body_that_stops_half_way_is_a_408(bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft_services.gateway.front.asgi_io.BODY_SECONDS", 0.05)
    async with bench() as b:
        reader, writer = await connect(b)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
        writer.write(b"content-length: 100\r\n\r\n{")
        assert b"408" in await reader.readline()
        writer.close()


async def test_tokens_that_are_ready_together_share_a_frame(bench: MakeBench) -> None:
    async with bench() as b:
        ids = b.ids("hello world")

        async def script(start: Any) -> Any:
            yield SequenceDelta(key=start.key, token_ids=ids, finish_reason=LENGTH)

        b.decode.script = script
        stream = await b.client.completions.create(model=MODEL_NAME, prompt="x", stream=True)
        assert [chunk.choices[0].text async for chunk in stream] == ["hello world"]


__all__ = ["keys"]
APP, OTHER = "http://app.example", "https://other.example"
ORIGIN = {"origin": APP}
API_PATHS = ("/v1/chat/completions", "/v1/models", "/v1/messages", "/v1/responses", "/v1/embeddings", "/tokenize")
CLOSED_PATHS = ("/", "/metrics", "/weft/page/main.js", "/weft/fleet/events", "/weft/workers/decode-0/drain")
# as the SDKs of OpenAI and Anthropic ask from a browser
WANTED = (
    "authorization,content-type,x-api-key,anthropic-version,anthropic-beta,openai-organization,"
    "x-stainless-lang,x-session-affinity,anthropic-dangerous-direct-browser-access"
)
CHAT: dict[str, Any] = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "hi"}]}


def preflight(method: str = "POST", origin: str = APP) -> dict[str, str]:
    return {
        "origin": origin,
        "access-control-request-method": method,
        "access-control-request-headers": WANTED,
    }


@pytest.mark.parametrize("origins", [APP, f"{OTHER}, {APP.upper()}/", "*"])
async def test_preflight_is_answered_without_a_key(bench: MakeBench, keys: Any, origins: str) -> None:
    async with bench(cors_origins=origins, keys=keys(entry("alice"))) as b:
        for path in (*API_PATHS, "/v1//models/"):
            for method in ("GET", "POST", "DELETE"):
                response = await b.http.options(path, headers=preflight(method))
                assert response.status_code in (200, 204), path
                allowed = {name: response.headers[f"access-control-allow-{name}"] for name in ("origin", "headers")}
                assert allowed == {"origin": "*" if origins == "*" else APP, "headers": WANTED}
                assert method in response.headers["access-control-allow-methods"]
                assert int(response.headers["access-control-max-age"]) > 0
                assert "origin" in response.headers["vary"].lower()
                assert "access-control-allow-credentials" not in response.headers


async def test_other_origins_get_no_permission(bench: MakeBench) -> None:
    async with bench(cors_origins=APP) as b:
        for origin in (OTHER, "null", f"{APP}.evil.example", "http://app.example:8080", "https://app.example"):
            refused = await b.http.options("/v1/models", headers=preflight(origin=origin))
            answered = await b.http.get("/v1/models", headers={"origin": origin})
            assert (refused.status_code, answered.status_code) == (400, 200)
            for response in (refused, answered):
                assert "access-control-allow-origin" not in response.headers


async def test_cors_is_off_by_default(bench: MakeBench) -> None:
    async with bench() as b:
        response = await b.http.options("/v1/chat/completions", headers=preflight())
        assert response.status_code == 405
        answered = await b.http.get("/v1/models", headers=ORIGIN)
        assert not [name for name in answered.headers if name.startswith("access-control")]


@pytest.mark.parametrize("origins", [APP, "*"])
async def test_operators_paths_stay_closed_to_pages(bench: MakeBench, origins: str) -> None:
    async with bench(cors_origins=origins) as b:
        for path in CLOSED_PATHS:
            for spelled in (path, f"/{path}", f"{path}/"):
                response = await b.http.options(b.url + spelled, headers=preflight())
                assert response.status_code >= 400, spelled
                assert "access-control-allow-origin" not in response.headers
        page = await b.http.get("/", headers=ORIGIN)
        assert "access-control-allow-origin" not in page.headers


async def test_answers_and_streams_carry_the_origin(bench: MakeBench) -> None:
    async with bench(cors_origins=APP) as b:
        b.decode.script = speaking([*b.ids("hello"), END])
        for path, body in (
            ("/v1/chat/completions", CHAT),
            ("/v1/chat/completions", {**CHAT, "stream": True}),
            ("/v1/messages", {**CHAT, "max_tokens": 9, "stream": True}),
            ("/v1/responses", {"model": MODEL_NAME, "input": "hi", "stream": True}),
            ("/tokenize", {"prompt": "x"}),
        ):
            response = await b.http.post(path, json=body, headers=ORIGIN)
            assert response.status_code == 200
            assert response.headers["access-control-allow-origin"] == APP
            assert "origin" in response.headers["vary"].lower()
            exposed = response.headers["access-control-expose-headers"].split(", ")
            assert {"x-request-id", "request-id", "retry-after", "x-ratelimit-remaining-tokens"} <= set(exposed)
            assert response.headers["x-request-id"]
        assert "access-control-allow-origin" not in (await b.http.get("/v1/models")).headers


async def test_errors_carry_the_origin(bench: MakeBench, keys: Any) -> None:
    limited = entry("bob", requests_per_minute=1)
    async with bench(cors_origins=APP, keys=keys(entry("alice"), limited)) as b:
        b.decode.script = speaking([*b.ids("hello"), END])
        alice = bearer("alice")
        json = {"content-type": "application/json"}
        large = b"x" * (MAX_BODY_BYTES + 1)
        cases: list[tuple[int, str, dict[str, Any]]] = [
            (401, "/v1/chat/completions", {"json": CHAT}),
            (400, "/v1/chat/completions", {"json": {}, "headers": alice}),
            (404, "/v1/nothing", {"json": {}, "headers": alice}),
            (404, "/chat/completions", {"json": {}, "headers": alice}),
            (405, "/v1/models", {"json": {}, "headers": alice}),
            (413, "/v1/chat/completions", {"content": large, "headers": alice | json}),
            (415, "/v1/chat/completions", {"content": b"x", "headers": alice}),
            (200, "/v1/completions", {"json": {"prompt": "x"}, "headers": bearer("bob")}),
            (429, "/v1/completions", {"json": {"prompt": "x"}, "headers": bearer("bob")}),
        ]
        for status, path, asked in cases:
            response = await b.http.post(path, **{**asked, "headers": ORIGIN | asked.get("headers", {})})
            assert (response.status_code, response.headers.get("access-control-allow-origin")) == (status, APP)
        assert {"retry-after", "x-ratelimit-limit-requests"} <= set(response.headers)


async def test_unforeseen_error_carries_the_origin(bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(ModelCards, "_openai", broken)
    async with bench(cors_origins=APP) as b:
        response = await b.http.get("/v1/models", headers=ORIGIN)
        assert (response.status_code, response.json()["error"]["message"]) == (500, "internal error")
        assert response.headers["access-control-allow-origin"] == APP
        assert response.headers["x-request-id"]


@pytest.mark.parametrize(
    ("origins", "expected"),
    [
        ("", ()),
        (" * ", ("*",)),
        ("https://a.example , http://localhost:3000/,", ("https://a.example", "http://localhost:3000")),
        ("app://obsidian.md,null", ("app://obsidian.md", "null")),
        ("http://[::1]:3000", ("http://[::1]:3000",)),
    ],
)
def test_cors_origins_are_a_list_by_commas(model_dir: Path, origins: str, expected: tuple[str, ...]) -> None:
    config = GatewayConfig(model=str(model_dir), scheduler_addr="x:1", cors_origins=origins)
    assert config.allowed_origins == expected


@pytest.mark.parametrize("wrong", ["app.example", "https://a.example/path", "https://*.example", "http://", "yes"])
def test_wrong_cors_origin_is_refused_at_start(model_dir: Path, wrong: str) -> None:
    with pytest.raises(ConfigError, match=f"WEFT_CORS_ORIGINS='{re.escape(wrong.rstrip('/'))}': expected"):
        GatewayConfig(model=str(model_dir), scheduler_addr="x:1", cors_origins=f"https://fine.example,{wrong}")
