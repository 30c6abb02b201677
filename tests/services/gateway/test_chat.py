"""Chat completions as the official client sees them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.services.gateway.conftest import END, MODEL_NAME, Bench, MakeBench
from tests.services.gateway.fakes import LENGTH, SequenceDelta, Start, deltas, speaking
from weft.kv.block_pool import block_keys
from weft.metrics import REGISTRY
from weft_services.gateway.dialects import openai_encoders
from weft_services.gateway.dialects.answers import GRAIN_BYTES, chat_logprobs

USER: ChatCompletionMessageParam = {"role": "user", "content": "tell me the answer"}
PROMPT = "<|im_start|>user\ntell me the answer<|im_end|>\n<|im_start|>assistant\n"


async def test_an_unstreamed_answer_has_text_reason_and_usage(bench: MakeBench) -> None:
    async with bench() as b:
        ids = b.ids("hello world")
        b.decode.script = speaking([*ids, END], cached=16)
        answer = await b.client.chat.completions.create(model=MODEL_NAME, messages=[USER])
        choice = answer.choices[0]
        assert choice.message.role == "assistant"
        assert (choice.message.content, choice.finish_reason) == ("hello world", "stop")
        assert answer.id.startswith("chatcmpl-")
        assert answer.system_fingerprint == "fp_abcdef012345"
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(b.ids(PROMPT))
        assert answer.usage.completion_tokens == len(ids) + 1
        assert answer.usage.total_tokens == len(b.ids(PROMPT)) + len(ids) + 1
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 16


async def test_the_worker_gets_the_rendered_prompt_and_the_scheduler_its_block_keys(bench: MakeBench) -> None:
    async with bench() as b:
        prompt = b.ids(PROMPT)
        await b.client.chat.completions.create(model=MODEL_NAME, messages=[USER], seed=7, max_completion_tokens=9)
        start, query = b.decode.started[0], b.scheduler.routed[0]
        assert list(start.token_ids) == prompt
        assert start.prefill.worker_id == "prefill-0"
        assert start.decode_boot_id == "boot-0"
        assert start.key == query.key
        assert (start.sampling.seed, start.sampling.max_tokens) == (7, 9)
        assert round(start.sampling.temperature, 6) == 0.7  # generation_config.json's
        assert list(query.block_keys) == block_keys(prompt, 16)
        assert (query.prompt_tokens, query.max_tokens) == (len(prompt), 9)
        await b.scheduler.until(lambda: len(b.scheduler.settled) == 2)
        assert b.scheduler.stages() == ["first_token", "finished"]


async def test_a_stream_opens_with_the_role_and_closes_with_usage(bench: MakeBench) -> None:
    async with bench() as b:
        ids = b.ids("hello world")
        b.decode.script = speaking(ids, LENGTH, cached=3)
        stream = await b.client.chat.completions.create(
            model=MODEL_NAME, messages=[USER], stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        first, last = chunks[0], chunks[-1]
        assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
        assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "hello world"
        assert chunks[-2].choices[0].finish_reason == "length"
        assert last.choices == []
        assert last.usage is not None
        assert last.usage.completion_tokens == len(ids)
        assert last.usage.prompt_tokens_details is not None
        assert last.usage.prompt_tokens_details.cached_tokens == 3
        assert all(chunk.usage is None for chunk in chunks[:-1])
        assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_chunks_tell_the_usage_so_far_where_vllms_clients_ask_for_it(bench: MakeBench, path: str) -> None:
    async with bench() as b:
        ids = b.ids("hello world and all")
        b.decode.script = speaking([*ids, END], cached=1)
        body: dict[str, Any] = {"messages": [USER]} if path == "chat/completions" else {"prompt": "hello"}
        options = {"include_usage": True, "continuous_usage_stats": True}
        body |= {"model": MODEL_NAME, "stream": True, "stream_options": options, "max_tokens": 99}
        response = await b.http.post(f"/v1/{path}", json=body)
        events = [json.loads(each[6:]) for each in response.text.split("\n\n") if each.startswith("data: {")]
        *told, last = [event["usage"] for event in events if event["usage"]]
        counts = [usage["completion_tokens"] for usage in told]
        assert counts == sorted(counts)
        assert counts[-1] == last["completion_tokens"] == len(ids) + 1
        assert {usage["prompt_tokens"] for usage in told} == {last["prompt_tokens"]}
        assert last["prompt_tokens_details"]["cached_tokens"] == 1


async def test_without_include_usage_no_chunk_speaks_of_it(bench: MakeBench) -> None:
    async with bench() as b:
        body = {"model": MODEL_NAME, "messages": [USER], "stream": True}
        response = await b.http.post("/v1/chat/completions", json=body)
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert "usage" not in response.text
        assert response.text.endswith("data: [DONE]\n\n")


async def test_two_choices_differ_in_seed_and_keep_their_indexes(bench: MakeBench) -> None:
    async with bench() as b:
        b.decode.script = speaking([*b.ids("hello"), END], cached=1000)
        answer = await b.client.chat.completions.create(model=MODEL_NAME, messages=[USER], n=2, seed=5)
        assert [(choice.index, choice.message.content) for choice in answer.choices] == [(0, "hello"), (1, "hello")]
        seeds = {start.sampling.seed for start in b.decode.started}
        assert len(seeds) == 2
        assert 5 in seeds
        assert len({start.key.request_id for start in b.decode.started}) == 2
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(b.ids(PROMPT))
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == answer.usage.prompt_tokens  # never more


async def test_choices_begin_in_their_order_whichever_speaks_first(bench: MakeBench) -> None:
    async with bench() as b:
        speak, others_ended = speaking([*b.ids("hello"), END]), asyncio.Semaphore(0)

        async def script(start: Start) -> AsyncIterator[SequenceDelta]:
            if is_first := start.sampling.seed == 5:
                await others_ended.acquire()
                await others_ended.acquire()
            async for delta in speak(start):
                yield delta
            if not is_first:
                others_ended.release()

        b.decode.script = script
        async with b.client.chat.completions.stream(model=MODEL_NAME, messages=[USER], n=3, seed=5) as running:
            answer = await running.get_final_completion()
        assert [(each.index, each.message.content) for each in answer.choices] == [(n, "hello") for n in range(3)]
        assert [each.finish_reason for each in answer.choices] == ["stop"] * 3


async def test_a_prompt_that_the_first_of_two_choices_computed_was_not_cached(bench: MakeBench) -> None:
    async with bench() as b:
        scripts = [speaking([*b.ids("hello"), END], cached=count) for count in (0, 16)]

        async def script(start: Start) -> AsyncIterator[SequenceDelta]:
            async for delta in scripts.pop(0)(start):
                yield delta

        b.decode.script = script
        answer = await b.client.chat.completions.create(model=MODEL_NAME, messages=[USER], n=2)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        # the prompt is counted once, so what was computed of it once counts as computed
        assert answer.usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize("num_tokens", [3, 400])
async def test_many_logprobs_are_not_written_on_the_loop(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    writers: list[threading.Thread] = []

    def watched(*told: Any) -> dict[str, Any]:
        writers.append(threading.current_thread())
        return chat_logprobs(*told)

    monkeypatch.setattr(openai_encoders, "chat_logprobs", watched)
    async with bench() as b:
        b.decode.script = speaking([*b.ids("a") * num_tokens, END])
        answer = await b.client.chat.completions.create(
            model=MODEL_NAME, messages=[USER], logprobs=True, top_logprobs=3
        )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert len(logprobs.content or ()) == num_tokens + 1
    assert [writer is threading.main_thread() for writer in writers] == [num_tokens == 3]


async def test_logprobs_have_the_shape_that_the_client_knows(bench: MakeBench) -> None:
    async with bench() as b:
        ids = b.ids("hello world")
        b.decode.script = speaking(ids, LENGTH)
        arguments = {"model": MODEL_NAME, "messages": [USER], "logprobs": True, "top_logprobs": 2}
        answer = await b.client.chat.completions.create(**arguments)  # type: ignore[call-overload]
        content = answer.choices[0].logprobs.content
        assert "".join(entry.token for entry in content) == "hello world"
        assert [len(entry.top_logprobs) for entry in content] == [2] * len(ids)
        assert bytes(content[0].bytes).decode() == content[0].token
        assert content[0].logprob == content[0].top_logprobs[0].logprob == -0.5
        stream = await b.client.chat.completions.create(stream=True, **arguments)  # type: ignore[call-overload]
        streamed = [c.choices[0].logprobs.content async for c in stream if c.choices and c.choices[0].logprobs]
        assert [entry.token for entries in streamed for entry in entries] == [entry.token for entry in content]


async def test_token_ids_are_returned_when_asked_for(bench: MakeBench) -> None:
    async with bench() as b:
        ids = [*b.ids("hello"), END]
        b.decode.script = speaking(ids)
        body = {"model": MODEL_NAME, "messages": [USER], "return_token_ids": True}
        answer = (await b.http.post("/v1/chat/completions", json=body)).json()
        assert answer["prompt_token_ids"] == b.ids(PROMPT)
        assert answer["choices"][0]["token_ids"] == ids
        stream = await b.client.chat.completions.create(
            model=MODEL_NAME, messages=[USER], stream=True, extra_body={"return_token_ids": True}
        )
        chunks = [chunk.to_dict() async for chunk in stream]
        assert chunks[0]["prompt_token_ids"] == b.ids(PROMPT)
        assert [i for c in chunks for i in c["choices"][0].get("token_ids", [])] == ids  # type: ignore[index]


async def test_a_session_header_reaches_the_scheduler_as_a_digest_only(bench: MakeBench) -> None:
    async with bench() as b:
        for headers in ({"x-session-affinity": "secret"}, {"x-session-id": "secret"}, {}):
            await b.client.chat.completions.create(model=MODEL_NAME, messages=[USER], extra_headers=headers)
        body = {"prompt_cache_key": "secret"}
        await b.client.chat.completions.create(model=MODEL_NAME, messages=[USER], extra_body=body)
        first, second, none, from_body = (query.session for query in b.scheduler.routed)
        assert first == second == from_body
        assert len(first) == 16
        assert none == b""


async def test_the_same_session_under_another_key_is_another_session(bench: MakeBench) -> None:
    async with bench() as b:
        for key in ("mine", "yours", "mine"):
            headers = {"authorization": f"Bearer {key}", "session-id": "secret"}
            body = {"model": MODEL_NAME, "messages": [USER]}
            await b.http.post("/v1/chat/completions", json=body, headers=headers)
        mine, yours, again = (query.session for query in b.scheduler.routed)
        assert mine == again != yours


async def test_the_time_to_the_first_token_is_the_clients_whatever_the_mesh_did_before(bench: MakeBench) -> None:
    def observed(part: str) -> float:
        return REGISTRY.get_sample_value(f"weft_time_to_first_token_seconds_{part}", {"model": MODEL_NAME}) or 0.0

    async with bench() as b:
        has_arrived = asyncio.Event()

        async def script(start: Start) -> AsyncIterator[SequenceDelta]:
            await has_arrived.wait()  # prefill has computed, its blocks are still on their way
            for delta in deltas(start, [*b.ids("hello"), END]):
                yield delta

        b.decode.script = script
        count, total, clock = observed("count"), observed("sum"), asyncio.get_running_loop().time
        async with asyncio.TaskGroup() as group:
            asked = group.create_task(b.client.chat.completions.create(model=MODEL_NAME, messages=[USER]))
            await b.decode.until(lambda: len(b.decode.started) == 1)
            begun = clock()
            await asyncio.sleep(0.05)
            waited = clock() - begun
            has_arrived.set()
        assert asked.result().choices[0].message.content == "hello"
        assert observed("count") == count + 1
        assert observed("sum") - total >= waited


@pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
async def test_the_length_of_an_event_says_little_where_the_client_asks_for_it(bench: MakeBench, path: str) -> None:
    inputs: dict[str, Any] = {"chat/completions": {"messages": [USER]}, "completions": {"prompt": "x"}}
    asked = {"model": MODEL_NAME, "stream": True, **inputs.get(path, {"input": "x"})}

    async def deltas_of(b: Bench, **options: Any) -> list[str]:
        response = await b.http.post(f"/v1/{path}", json={**asked, "stream_options": options})
        return [each for each in response.text.split("\n\n") if '"delta"' in each or '"text":' in each]

    async with bench() as b:
        b.decode.script = speaking([*b.ids("a sentence with longer and shorter words"), END])
        bare = await deltas_of(b)
        hidden = await deltas_of(b, include_obfuscation=True)
        assert not any("obfuscation" in each for each in bare)
        padded = [each for each in hidden if "obfuscation" in each]
        assert len(padded) >= 2
        assert {(len(each.encode()) + 2) % GRAIN_BYTES for each in padded} == {0}
        assert any(json.loads(each.partition("data: ")[2])["obfuscation"] for each in padded)
