"""Completions as the official client and vLLM's clients use them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.services.gateway.conftest import CONTEXT, END, MODEL_NAME, VOCABULARY, MakeBench
from tests.services.gateway.fakes import LENGTH, speaking


async def test_a_text_prompt_is_continued(bench: MakeBench) -> None:
    async with bench() as b:
        b.decode.script = speaking([*b.ids(" world"), END])
        answer = await b.client.completions.create(model=MODEL_NAME, prompt="hello")
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (" world", "stop")
        assert answer.id.startswith("cmpl-")
        assert list(b.decode.started[0].token_ids) == b.ids("hello")
        assert b.decode.started[0].sampling.max_tokens == 16  # as OpenAI has it


async def test_a_stream_says_the_same(bench: MakeBench) -> None:
    async with bench() as b:
        b.decode.script = speaking([*b.ids(" world"), END])
        stream = await b.lenient.completions.create(
            model=MODEL_NAME, prompt="hello", stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == " world"
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.prompt_tokens_details is not None


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
    ids=["one", "several"],
)
async def test_token_ids_are_taken_as_they_are(bench: MakeBench, prompt: Any, expected: list[list[int]]) -> None:
    async with bench() as b:
        answer = await b.client.completions.create(model=MODEL_NAME, prompt=prompt)
        assert sorted(list(start.token_ids) for start in b.decode.started) == sorted(expected)
        assert [choice.index for choice in answer.choices] == list(range(len(expected)))
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == sum(map(len, expected))


async def test_several_prompts_times_n_are_ordered_by_prompt(bench: MakeBench) -> None:
    async with bench() as b:
        extra = {"return_token_ids": True}
        answer = await b.client.completions.create(model=MODEL_NAME, prompt=["a", "b"], n=2, extra_body=extra)
        prompts = [choice.to_dict()["prompt_token_ids"] for choice in answer.choices]
        assert prompts == [b.ids("a"), b.ids("a"), b.ids("b"), b.ids("b")]
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 4)
        stream = await b.lenient.completions.create(model=MODEL_NAME, prompt=["a", "b"], n=2, stream=True)
        assert {chunk.choices[0].index async for chunk in stream} == {0, 1, 2, 3}


async def test_logprobs_are_four_parallel_lists_with_offsets(bench: MakeBench) -> None:
    async with bench() as b:
        ids = b.ids(" world wide")
        b.decode.script = speaking(ids, LENGTH)
        answer = await b.client.completions.create(model=MODEL_NAME, prompt="hello", logprobs=1)
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.tokens is not None
        assert logprobs.top_logprobs is not None
        assert "".join(logprobs.tokens) == " world wide"
        assert logprobs.token_logprobs == [-0.5] * len(ids)
        assert logprobs.top_logprobs[0][logprobs.tokens[0]] == -0.5
        assert logprobs.text_offset == [len("".join(logprobs.tokens[:i])) for i in range(len(ids))]
        stream = await b.lenient.completions.create(model=MODEL_NAME, prompt="hello", logprobs=1, stream=True)
        offsets: list[int] = []
        async for chunk in stream:
            if chunk.choices[0].logprobs is not None:
                offsets += chunk.choices[0].logprobs.text_offset or []
        assert offsets == logprobs.text_offset


async def test_sampling_fields_reach_the_worker(bench: MakeBench) -> None:
    async with bench() as b:
        extra = {"top_k": 5, "min_p": 0.25, "ignore_eos": True, "stop_token_ids": [9]}
        await b.client.completions.create(
            model=MODEL_NAME, prompt="x", temperature=0.5, top_p=0.75, max_tokens=3, seed=11, extra_body=extra
        )
        sampling = b.decode.started[0].sampling
        assert (sampling.temperature, sampling.top_p, sampling.min_p) == (0.5, 0.75, 0.25)
        assert (sampling.top_k, sampling.seed, sampling.max_tokens) == (5, 11, 3)
        assert sampling.ignore_eos
        assert list(sampling.stop_token_ids) == [9]
        assert not sampling.HasField("num_logprobs")
        assert not sampling.HasField("repetition_penalty")


async def test_penalties_and_biases_reach_the_engine(bench: MakeBench) -> None:
    async with bench() as b:
        await b.client.completions.create(
            model=MODEL_NAME,
            prompt="x",
            max_tokens=9,
            frequency_penalty=0.5,
            presence_penalty=-0.25,
            logit_bias={"7": -100, "9": 2},
            extra_body={"repetition_penalty": 1.25, "min_tokens": 4},
        )
        sampling = b.decode.started[0].sampling
        assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.5, -0.25)
        assert (sampling.repetition_penalty, sampling.min_tokens) == (1.25, 4)
        assert [(entry.token_id, entry.bias) for entry in sampling.logit_bias] == [(7, -100.0), (9, 2.0)]


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"logit_bias": {"320": 1}}, "logit_bias"), ({"min_tokens": 6, "max_tokens": 5}, "min_tokens")],
)
async def test_what_only_the_model_can_tell_names_its_field(
    bench: MakeBench, fields: dict[str, Any], param: str
) -> None:
    async with bench() as b:
        status, error = await b.refused("/v1/completions", prompt="x", **fields)
        assert (status, error["param"]) == (400, param)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_across_tokens_ends_the_answer_and_the_engine(bench: MakeBench, stream: bool) -> None:
    async with bench() as b:
        ids = b.ids("one STOP two")
        b.decode.script = speaking([*ids, *ids], finish=None)
        body = {"model": MODEL_NAME, "prompt": "x", "stop": ["ST", " STOP"], "stream": stream}
        response = await b.http.post("/v1/completions", json=body)
        assert "two" not in response.text
        assert "ST" not in response.text
        if not stream:
            choice = response.json()["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == ("one ", "stop")
            assert response.json()["usage"]["completion_tokens"] == len(b.ids("one ST"))
        await b.decode.until(lambda: len(b.decode.cancelled) == 1)
        await b.scheduler.until(lambda: b.scheduler.stages() == ["first_token", "finished"])


async def test_the_text_of_a_stop_token_is_not_part_of_the_answer(bench: MakeBench) -> None:
    async with bench() as b:
        ids = b.ids("hello world")
        b.decode.script = speaking(ids)  # the engine says: stopped, by the last of these
        extra = {"stop_token_ids": [ids[-1]], "return_token_ids": True}
        answer = await b.client.completions.create(model=MODEL_NAME, prompt="x", extra_body=extra)
        assert answer.choices[0].text == b.tokenizer.decode(ids[:-1])
        assert answer.choices[0].to_dict()["token_ids"] == ids


async def test_characters_that_are_split_over_tokens_arrive_whole(bench: MakeBench) -> None:
    async with bench() as b:
        text = "naïve 🙂 日本"
        b.decode.script = speaking(b.ids(text), LENGTH)
        stream = await b.lenient.completions.create(model=MODEL_NAME, prompt="x", max_tokens=99, stream=True)
        texts = [chunk.choices[0].text async for chunk in stream]
        assert "".join(texts) == text
        assert "\ufffd" not in "".join(texts)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"prompt": [VOCABULARY]}, "prompt", "invalid_value"),
        ({"prompt": [-1]}, "prompt", "invalid_value"),
        ({"prompt": ""}, "prompt", "invalid_value"),
        ({"prompt": [5] * CONTEXT}, "prompt", "context_length_exceeded"),
        ({"prompt": "x" * 2000}, "prompt", "context_length_exceeded"),
        ({"prompt": "x" * 1_000_000}, "prompt", "context_length_exceeded"),
        ({"prompt": "x", "max_tokens": CONTEXT}, "max_tokens", "context_length_exceeded"),
        ({"prompt": "x", "max_tokens": 10**9}, "max_tokens", "context_length_exceeded"),
        ({"prompt": "x", "stop_token_ids": [VOCABULARY]}, "stop_token_ids", "invalid_value"),
    ],
)
async def test_what_does_not_fit_the_model_is_refused(
    bench: MakeBench, fields: dict[str, Any], param: str, code: str
) -> None:
    async with bench() as b:
        status, error = await b.refused("/v1/completions", **fields)
        assert (status, error["param"], error["code"]) == (400, param, code)
        assert error["type"] == "invalid_request_error"
        assert b.scheduler.routed == []


async def test_a_conversation_that_is_too_long_names_the_messages(bench: MakeBench) -> None:
    async with bench() as b:
        status, error = await b.refused("/v1/chat/completions", messages=[{"role": "user", "content": "x" * 3000}])
        assert (status, error["param"], error["code"]) == (400, "messages", "context_length_exceeded")
        status, error = await b.refused(
            "/v1/chat/completions", messages=[{"role": "user", "content": "x"}], max_completion_tokens=10**9
        )
        assert (status, error["param"]) == (400, "max_completion_tokens")


async def test_a_template_may_refuse_a_conversation(bench: MakeBench) -> None:
    async with bench() as b:
        messages = [{"role": "user", "content": "refuse me"}]
        status, error = await b.refused("/v1/chat/completions", messages=messages)
        assert (status, error["param"], error["message"]) == (400, "messages", "roles must alternate")
