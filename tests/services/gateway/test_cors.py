"""CORS: pages of other origins may use the API and nothing else."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.services.gateway.conftest import END, MODEL_NAME, MakeBench
from tests.services.gateway.fakes import speaking
from tests.services.gateway.test_keys import bearer, entry, keys
from weft.errors import ConfigError
from weft_services.gateway.config import GatewayConfig
from weft_services.gateway.front.asgi_io import MAX_BODY_BYTES
from weft_services.gateway.front.local_endpoints import ModelCards

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
