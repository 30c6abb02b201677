"""Prompts that are given back and scored: what workers are asked, what clients are told, and when a worker is lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from tests.services.gateway.conftest import MODEL_NAME, Bench, MakeBench
from tests.services.gateway.fakes import LENGTH, STOP, Script, SequenceDelta, Start, deltas, forever, speaking
from tests.services.gateway.test_grpc import stub_of
from tests.services.gateway.test_migrations import ask, events
from weft.request import PositionLogprobs
from weft_mesh.v1 import common_pb2, decode_service_pb2
from weft_mesh.v1 import inference_service_pb2 as pb
from weft_services.gateway.dialects.answers import positions_of
from weft_services.gateway.front import grpc_service

pytestmark = pytest.mark.usefixtures("heard")

PIECE = 3  # tokens in one


def scored(start: Start, shift: float = 0.0) -> list[SequenceDelta]:
    """Token p of the prompt has logprob -p and rank 2; the alternatives there are tokens 10, 11, ..."""
    found, num_top = [], start.num_prompt_logprobs
    for first in range(1, len(start.token_ids), PIECE):
        places = range(first, min(first + PIECE, len(start.token_ids)))
        piece = decode_service_pb2.PromptLogprobs(
            start=first,
            chosen=[shift - place for place in places],
            ranks=[2] * len(places),
            num_top=num_top,
            top_ids=[10 + rank for _ in places for rank in range(num_top)],
            top=[-0.125 - rank for _ in places for rank in range(num_top)],
        )
        found.append(SequenceDelta(key=start.key, prompt_logprobs=piece))
    return found


def scoring(token_ids: Sequence[int], num_pieces: int | None = None, shift: float = 0.0) -> Script:
    """What is asked of the prompt, then these tokens; with `num_pieces`, only so much and no more."""

    async def script(start: Start) -> AsyncIterator[SequenceDelta]:
        if start.HasField("num_prompt_logprobs"):
            for delta in scored(start, shift)[:num_pieces]:
                yield delta
        if num_pieces is not None:
            await forever()
        for delta in deltas(start, token_ids, LENGTH):
            yield delta

    return script


async def complete(b: Bench, **fields: Any) -> dict[str, Any]:
    response = await b.http.post("/v1/completions", json={"model": MODEL_NAME, **fields})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


async def test_an_echo_with_logprobs_begins_with_the_prompts(bench: MakeBench) -> None:
    async with bench() as b:
        prompt, more = b.ids("hello wide \N{GRINNING FACE} world"), b.ids(" and")
        b.decode.script = scoring(more)
        text = b.tokenizer.decode(prompt)
        (choice,) = (await complete(b, prompt=prompt, echo=True, logprobs=2, max_tokens=9))["choices"]
        told = choice["logprobs"]
        assert choice["text"] == text + " and"
        assert told["tokens"] == [b.tokenizer.decode([token]) for token in [*prompt, *more]]
        assert told["token_logprobs"] == [None, *(-place for place in range(1, len(prompt))), *[-0.5] * len(more)]
        assert told["top_logprobs"][0] is None
        assert told["top_logprobs"][1] == {
            told["tokens"][1]: -1,
            b.tokenizer.decode([10]): -0.125,
            b.tokenizer.decode([11]): -1.125,
        }
        before = [b.tokenizer.decode(prompt[:count]) for count in range(len(prompt))]
        # a character that is not whole has not begun the next one
        places = [len(each.rstrip("\N{REPLACEMENT CHARACTER}")) for each in before]
        assert told["text_offset"][: len(prompt) + 1] == [*places, len(text)]
        start, routed = b.decode.started[0], b.scheduler.routed[0]
        assert (start.num_prompt_logprobs, start.HasField("prefill"), routed.computes_prompt) == (2, False, True)


async def test_without_logprobs_an_echo_asks_nothing_of_the_workers(bench: MakeBench) -> None:
    async with bench() as b:
        b.decode.script = scoring(b.ids(" world"))
        text = "hello <|im_end|>  you"
        body = await complete(b, prompt=[text, b.ids(text)], echo=True)
        assert [choice["text"] for choice in body["choices"]] == [text + " world"] * 2
        assert not any(start.HasField("num_prompt_logprobs") for start in b.decode.started)
        assert not any(query.computes_prompt for query in b.scheduler.routed)


async def test_no_token_is_as_many_as_none(bench: MakeBench) -> None:
    async with bench() as b:
        b.decode.script = scoring(b.ids("h")[:1])
        body = await complete(b, prompt="hello", echo=True, logprobs=0, max_tokens=0)
        (choice,) = body["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("hello", "length")
        assert len(choice["logprobs"]["tokens"]) == len(b.ids("hello"))
        assert body["usage"]["completion_tokens"] == 0
        assert b.decode.started[0].sampling.max_tokens == 1, "an engine samples where a prompt ends"
        response = await b.http.post(
            "/v1/completions",
            json={"model": MODEL_NAME, "prompt": "hello", "echo": True, "max_tokens": 0, "stream": True},
        )
        (event,) = events(response)
        assert (event["choices"][0]["text"], event["choices"][0]["finish_reason"]) == ("hello", "length")


async def test_a_prompt_of_one_token_has_nothing_to_tell(bench: MakeBench) -> None:
    async with bench() as b:
        b.decode.script = scoring([5])
        (choice,) = (await complete(b, prompt=[7], echo=True, logprobs=1, prompt_logprobs=1, max_tokens=0))["choices"]
        assert (choice["logprobs"]["token_logprobs"], choice["prompt_logprobs"]) == ([None], [None])


async def test_choices_of_one_prompt_have_it_scored_once(bench: MakeBench) -> None:
    async with bench() as b:
        b.decode.script = scoring(b.ids(" world"))
        body = await complete(b, prompt=["hello", "there"], n=2, echo=True, logprobs=1, prompt_logprobs=0)
        lengths = [len(b.ids(text)) for text in ("hello", "hello", "there", "there")]
        assert [len(choice["prompt_logprobs"]) for choice in body["choices"]] == lengths
        assert sum(start.HasField("num_prompt_logprobs") for start in b.decode.started) == 2
        token = str(b.ids("hello")[1])
        entry = body["choices"][1]["prompt_logprobs"][1]
        assert entry == {token: {"logprob": -1, "rank": 2, "decoded_token": b.tokenizer.decode([int(token)])}}
        chat = await b.http.post(
            "/v1/chat/completions",
            json={
                "model": MODEL_NAME,
                "messages": [{"role": "user", "content": "hi"}],
                "prompt_logprobs": 1,
                "return_token_ids": True,
            },
        )
        found = chat.json()
        assert len(found["prompt_logprobs"]) == len(found["prompt_token_ids"])


async def test_over_grpc_they_come_with_the_first_piece(bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    writers: list[threading.Thread] = []

    def watched(*asked: Any) -> list[PositionLogprobs]:
        writers.append(threading.current_thread())
        return positions_of(*asked)

    monkeypatch.setattr(grpc_service, "positions_of", watched)
    async with bench() as b, stub_of(b) as stub:
        b.decode.script = scoring(b.ids(" world"))
        options = pb.GenerationOptions(num_prompt_logprobs=1)
        answer = [r async for r in stub.Generate(pb.GenerateRequest(text="hello", options=options), timeout=10)]
        told = [position.chosen for position in answer[0].prompt_logprobs]
        assert [entry.token_id for entry in told] == b.ids("hello")[1:]
        assert [entry.logprob for entry in told] == [-place for place in range(1, len(b.ids("hello")))]
        assert not any(response.prompt_logprobs for response in answer[1:])
        assert len(writers) == 1
        assert writers[0] is not threading.main_thread(), "as in REST, others do not wait for so many"


async def test_scores_of_an_attempt_that_is_lost_before_it_speaks_are_those_of_the_next(bench: MakeBench) -> None:
    async with bench(num_decoders=2) as b:
        b.decode.script, b.decoders[1].script = scoring([], num_pieces=2), scoring([5], shift=-0.5)
        prompt = list(range(20, 30))
        response = await ask(b, prompt=prompt, echo=True, logprobs=0, max_tokens=1, stream=True)
        (choice,) = (event["choices"][0] for event in events(response))
        told = choice["logprobs"]["token_logprobs"]
        assert told == [None, *(-0.5 - place for place in range(1, 10)), -0.5]


async def test_scores_are_not_asked_for_again_once_an_attempt_has_spoken(bench: MakeBench) -> None:
    async with bench(num_decoders=2) as b:

        async def first(start: Start) -> AsyncIterator[SequenceDelta]:
            for delta in (*scored(start), *deltas(start, [5], None)):
                yield delta
            await forever()

        b.decode.script, b.decoders[1].script = first, speaking([6], LENGTH)
        response = await ask(b, prompt=list(range(20, 30)), echo=True, logprobs=0, max_tokens=2, stream=True)
        told = [each for event in events(response) for each in event["choices"][0]["logprobs"]["token_logprobs"]]
        assert told == [None, *(-place for place in range(1, 10)), -0.5, -0.5]
        assert not b.decoders[1].started[0].HasField("num_prompt_logprobs")
        assert [query.computes_prompt for query in b.scheduler.routed] == [True, False]


async def test_the_best_have_the_best_mean_whatever_their_length(bench: MakeBench) -> None:
    async with bench() as b:
        order = iter([(-3.0, 1), (-1.0, 4), (-2.0, 1), (-0.5, 2)])

        async def script(start: Start) -> AsyncIterator[SequenceDelta]:
            chance, count = next(order)
            assert start.sampling.num_logprobs == 0
            for delta in deltas(start, [20 + count] * count, STOP):
                delta.logprobs[0].chosen.CopyFrom(common_pb2.TokenLogprob(token_id=20 + count, logprob=chance))
                yield delta

        b.decode.script = script
        body = await complete(b, prompt="x", n=2, best_of=4, return_token_ids=True)
        assert [choice["token_ids"] for choice in body["choices"]] == [[22] * 2, [24] * 4]
        assert [(choice["index"], choice["logprobs"]) for choice in body["choices"]] == [(0, None), (1, None)]
        assert body["usage"]["completion_tokens"] == 8


async def test_more_than_a_request_may_have_is_refused(bench: MakeBench) -> None:
    async with bench(context=16_000) as b:
        many = {"prompt": [5] * 13_500, "max_tokens": 0}
        for field in ("logprobs", "prompt_logprobs"):
            status, error = await b.refused("/v1/completions", **many, echo=True, **{field: 20})
            assert (status, error["param"]) == (400, field)
        b.decode.script = scoring([5])
        async with asyncio.timeout(20):
            body = await complete(b, **many, echo=True, logprobs=1)
        assert len(body["choices"][0]["logprobs"]["tokens"]) == 13_500
