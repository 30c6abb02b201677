"""Spellings of request paths, suggestions in 404 and 405, and model lists in both API formats."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from tests.services.gateway.conftest import CONTEXT, END, MODEL_NAME, Bench, MakeBench
from tests.services.gateway.fakes import speaking
from tests.services.gateway.test_keys import SECRETS, bearer, entry, keys
from tests.services.gateway.test_models import OTHER, both
from weft_services.gateway.front.asgi_io import normalized_path, suggested_path

__all__ = ["both", "keys"]
USER: Any = [{"role": "user", "content": "hi"}]
ANTHROPIC = {"anthropic-version": "2023-06-01"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER, "max_tokens": 2},
    "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/messages": {"messages": USER, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": USER},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": []},
}


@pytest.mark.parametrize(
    ("path", "plain"),
    [
        ("/v1//models", "/v1/models"),
        ("//v1/models//", "/v1/models"),
        ("/v1/models/org/name/", "/v1/models/org/name"),
        ("/", "/"),
        ("///", "/"),
        ("", "/"),
        ("/v1/models", "/v1/models"),
    ],
)
def test_plain_path_drops_empty_segments(path: str, plain: str) -> None:
    assert normalized_path(path) == plain


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/v1/models", "/v1/models"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/completions", "/v1/completions"),
        ("/messages/count_tokens", "/v1/messages/count_tokens"),
        ("/models/org/name", "/v1/models/org/name"),
        ("/responses/resp_1/input_items", "/v1/responses/resp_1/input_items"),
        ("/openai/v1/chat/completions", "/v1/chat/completions"),
        ("/openai/deployments/gpt/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/v1/responses", "/v1/responses"),
        ("/anthropic/v1/messages", "/v1/messages"),
        ("/v1/tokenize", "/tokenize"),
        ("/v1/health", "/health"),
        ("/v1", "/v1/models"),
        ("/api/v1", "/v1/models"),
        ("/api/chat", "/v1/chat/completions"),
        ("/api/tags", "/v1/models"),
        ("/v1/chat/completions", None),
        ("/v1/images/generations", None),
        ("/props", None),
        ("/", None),
    ],
)
def test_meant_path_finds_the_endpoint(path: str, meant: str | None) -> None:
    assert suggested_path(path) == meant


@pytest.mark.parametrize("shape", ["/{}", "{}/", "{}//"])
@pytest.mark.parametrize("path", BODIES)
async def test_slashes_do_not_change_an_address(bench: MakeBench, path: str, shape: str) -> None:
    spelled = shape.format(path.replace("/v1/", "/v1//"))
    async with bench() as b:
        b.decode.script = speaking([*b.ids("hello"), END])
        response = await b.http.post(b.url + spelled, json={**BODIES[path], "model": MODEL_NAME})
        assert response.status_code == 200, response.text


async def test_streams_and_keys_work_with_extra_slashes(bench: MakeBench, keys: Any) -> None:
    async with bench(keys=keys(entry("alice"), entry("ops", operator=True))) as b:
        b.decode.script = speaking([*b.ids("hello"), END])
        client = b.client.copy(base_url=f"{b.url}/v1//", api_key=SECRETS["alice"])
        stream = await client.chat.completions.create(model=MODEL_NAME, messages=USER, stream=True)
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "hello"
        for path in ("//metrics", "/metrics/", "//weft/fleet/events", "/weft//workers/x/drain/"):
            assert (await b.http.get(b.url + path, headers=bearer("alice"))).status_code in (403, 405), path
        assert (await b.http.get("/metrics/", headers=bearer("ops"))).status_code == 200
        for open_path in ("/health/", "//ready"):
            assert (await b.http.get(b.url + open_path)).status_code == 200


async def test_unserved_address_is_404_for_any_key(bench: MakeBench, keys: Any) -> None:
    async with bench(keys=keys(entry("alice"), entry("ops", operator=True))) as b:
        theirs = (await b.http.get("/v1/models", headers=ANTHROPIC)).json()
        assert (theirs["type"], theirs["error"]["type"]) == ("error", "authentication_error")
        for path, says in (("/chat/completions", "/v1/chat/completions"), ("/v1", "/v1/models"), ("/props", "")):
            assert (await b.http.get(path)).status_code == 401
            response = await b.http.get(path, headers=bearer("alice"))
            assert (response.status_code, response.json()["error"]["code"]) == (404, "unknown_url")
            assert f"the address here is {says}" in response.json()["error"]["message"] or not says


async def test_404_names_the_address_in_the_form_of_the_api(bench: MakeBench) -> None:
    async with bench() as b:
        theirs = (await b.http.post("/v1/v1/messages", headers=ANTHROPIC, json={})).json()
        assert (theirs["type"], theirs["error"]["type"]) == ("error", "not_found_error")
        assert theirs["error"]["message"].endswith("the address here is /v1/messages")
        ours = (await b.http.post("/v1/v1/messages", json={})).json()
        assert ours["error"]["message"] == theirs["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", {"POST"}),
        ("HEAD", "/v1/messages", {"POST"}),
        ("PUT", "/v1/models/", {"GET", "HEAD"}),
        ("POST", f"/v1/models/{MODEL_NAME}", {"GET", "HEAD"}),
    ],
)
async def test_405_names_the_methods(bench: MakeBench, method: str, path: str, allowed: set[str]) -> None:
    async with bench() as b:
        response = await b.http.request(method, path)
        assert response.status_code == 405
        assert set(response.headers["allow"].split(", ")) == allowed
        assert method == "HEAD" or f"use {', '.join(sorted(allowed))}" in response.text


async def test_head_answers_as_get_without_a_body(bench: MakeBench) -> None:
    async with bench() as b:
        for path in ("/v1//models", f"/v1/models/{MODEL_NAME}/", "/health"):
            head, get = await b.http.head(path), await b.http.get(path)
            assert (head.status_code, head.headers["content-length"]) == (200, get.headers["content-length"])
            assert head.content == b""


async def test_model_names_may_have_slashes(bench: MakeBench, both: str) -> None:
    async with bench(model=both.replace(f"{OTHER}=", "org/other=")) as b:
        for path in ("/v1/models/org/other", "/v1/models/org%2Fother", "/v1//models/org/other/"):
            assert (await b.http.get(path)).json()["id"] == "org/other"
            assert (await b.http.get(path, headers=ANTHROPIC)).json()["id"] == "org/other"


def claude(b: Bench) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=b.url, api_key="none", max_retries=0, _strict_response_validation=True)


async def test_anthropics_sdk_lists_models_in_its_form(bench: MakeBench, both: str) -> None:
    async with bench(model=both) as b, claude(b) as client:
        models = [model async for model in client.models.list(limit=1)]
        assert [(model.id, model.type, model.display_name) for model in models] == [
            (MODEL_NAME, "model", MODEL_NAME),
            (OTHER, "model", OTHER),
        ]
        assert [model.max_input_tokens for model in models] == [CONTEXT, CONTEXT // 2]
        one = await client.models.retrieve(OTHER)
        assert (one, one.created_at.tzinfo is not None) == (models[1], True)
        with pytest.raises(anthropic.NotFoundError) as refusal:
            await client.models.retrieve("third")
        assert isinstance(refusal.value.body, dict)
        assert refusal.value.body["error"]["type"] == "not_found_error"


async def test_anthropics_list_is_paged(bench: MakeBench, both: str) -> None:
    async with bench(model=both) as b:

        async def page(**query: Any) -> dict[str, Any]:
            response = await b.http.get("/v1/models", params=query, headers=ANTHROPIC)
            return {**response.json(), "status": response.status_code}

        def ends(got: dict[str, Any]) -> tuple[Any, ...]:
            return got["first_id"], got["last_id"], got["has_more"], len(got["data"])

        assert ends(await page()) == (MODEL_NAME, OTHER, False, 2)
        assert ends(await page(limit=1)) == (MODEL_NAME, MODEL_NAME, True, 1)
        assert ends(await page(after_id=MODEL_NAME)) == (OTHER, OTHER, False, 1)
        assert ends(await page(before_id=OTHER, limit=1)) == (MODEL_NAME, MODEL_NAME, False, 1)
        assert ends(await page(after_id=OTHER)) == (None, None, False, 0)
        for wrong in ({"limit": 0}, {"limit": "x"}, {"limit": 1001}, {"after_id": "x"}, {"before_id": "x"}):
            refused = await page(**wrong)
            assert (refused["status"], refused["error"]["type"]) == (400, "invalid_request_error"), wrong


async def test_openais_card_tells_the_context_length(bench: MakeBench) -> None:
    async with bench() as b:
        listed = await b.client.models.list()
        card = listed.data[0].to_dict()
        assert (card["max_model_len"], card["context_length"], card["object"]) == (CONTEXT, CONTEXT, "model")


async def test_openai_paths_keep_their_form_with_anthropics_header(bench: MakeBench) -> None:
    async with bench() as b:
        for path in ("/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/tokenize"):
            refused = await b.http.post(path, json={}, headers=ANTHROPIC)
            assert set(refused.json()) == {"error"}, path
            assert set((await b.http.put(path, headers=ANTHROPIC)).json()) == {"error"}, path


@pytest.mark.parametrize("path", BODIES)
async def test_only_model_need_not_be_named(bench: MakeBench, both: str, path: str) -> None:
    async with bench() as b:
        b.decode.script = speaking([*b.ids("hello"), END])
        response = await b.http.post(path, json=BODIES[path])
        assert response.status_code == 200, response.text
        assert response.json().get("model", MODEL_NAME) == MODEL_NAME
    async with bench(model=both) as b:
        refused = await b.http.post(path, json=BODIES[path])
        assert (refused.status_code, f"'{MODEL_NAME}', '{OTHER}'" in refused.text) == (400, True)
