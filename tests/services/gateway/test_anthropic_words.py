"""/v1/messages: what agents read in the words of an error, and turns of which nothing but thoughts is left."""

from __future__ import annotations

import re
from typing import Any

import anthropic
import pytest

from tests.services.gateway.conftest import CONTEXT, MODEL_NAME, MakeBench
from tests.services.gateway.test_anthropic import client

USER: Any = {"role": "user", "content": "weather?"}
# by these Claude Code sums a conversation up, and asks again for fewer tokens
TOO_LONG = re.compile(r"prompt is too long: (\d+) tokens > (\d+) maximum")
TOO_MUCH = re.compile(r"input length and `max_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+)")


async def message_of(sdk: anthropic.AsyncAnthropic, **fields: Any) -> str:
    """Of the refusal."""
    with pytest.raises(anthropic.BadRequestError) as refusal:
        await sdk.messages.create(**{"model": MODEL_NAME, "max_tokens": 9, "messages": [USER], **fields})
    body: Any = refusal.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    return str(body["error"]["message"])


async def test_what_does_not_fit_is_told_in_anthropics_words(bench: MakeBench) -> None:
    async with bench() as b, client(b) as sdk:
        long: Any = [{"role": "user", "content": "a b " * 300}]
        counted = (await sdk.messages.count_tokens(model=MODEL_NAME, messages=long)).input_tokens
        found = TOO_LONG.search(await message_of(sdk, messages=long))
        assert found is not None
        assert (int(found[1]), int(found[2])) == (counted, CONTEXT - 1)
        counted = (await sdk.messages.count_tokens(model=MODEL_NAME, messages=[USER])).input_tokens
        found = TOO_MUCH.search(await message_of(sdk, max_tokens=9000))
        assert found is not None
        assert tuple(map(int, found.groups())) == (counted, 9000, CONTEXT)
        # and what is left fits
        await sdk.messages.create(model=MODEL_NAME, max_tokens=CONTEXT - counted, messages=[USER])


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("POST", "/v1/messages/batches", 404, "not_found_error"),
        ("GET", "/v1/messages", 405, "invalid_request_error"),
    ],
)
async def test_routes_that_are_not_there_are_told_in_anthropics_words(
    bench: MakeBench, method: str, path: str, status: int, kind: str
) -> None:
    async with bench() as b:
        answer = await b.http.request(method, path, json={})
        told = answer.json()
        assert (answer.status_code, told["type"], told["error"]["type"]) == (status, "error", kind)
        assert answer.headers["request-id"]


async def test_a_turn_of_thoughts_alone_stays_a_turn(bench: MakeBench) -> None:
    async with bench() as b:
        thought = {"type": "thinking", "thinking": "hm", "signature": ""}
        messages = [USER, {"role": "assistant", "content": [thought]}, USER]
        body = {"model": MODEL_NAME, "max_tokens": 9, "messages": messages}
        assert (await b.http.post("/v1/messages", json=body)).status_code == 200
        chat = [USER, {"role": "assistant", "content": None, "reasoning_content": "hm"}, USER]
        body = {"model": MODEL_NAME, "messages": chat}
        assert (await b.http.post("/v1/chat/completions", json=body)).status_code == 200
        prompts = {b.tokenizer.decode(list(each.token_ids), skip_special_tokens=False) for each in b.decode.started}
        assert [prompt.count("<|im_start|>assistant") for prompt in prompts] == [2]


async def test_what_an_assistant_refused_is_what_it_said(bench: MakeBench) -> None:
    async with bench() as b:
        chat = [USER, {"role": "assistant", "content": None, "refusal": "I will not."}, USER]
        assert (
            await b.http.post("/v1/chat/completions", json={"model": MODEL_NAME, "messages": chat})
        ).status_code == 200
        assert "I will not." in b.tokenizer.decode(list(b.decode.started[0].token_ids))
