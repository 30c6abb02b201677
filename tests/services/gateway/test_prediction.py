"""Speculation as clients see it: a predicted answer, the switch, and the counts of draft tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from tests.services.gateway.conftest import CONTEXT, END, MODEL_NAME, MakeBench
from tests.services.gateway.fakes import STOP, Script, SequenceDelta, Start, answering, deltas, forever
from tests.services.gateway.test_access_log import Log
from tests.services.gateway.test_grpc import stub_of
from tests.services.gateway.test_migrations import kill_after
from weft_mesh.v1 import decode_service_pb2
from weft_mesh.v1 import inference_service_pb2 as pb

MESSAGES: Any = [{"role": "user", "content": "hello"}]
CHAT: dict[str, Any] = {"model": MODEL_NAME, "messages": MESSAGES}
EXPECTED = "hello world, the answer"


def drafting(token_ids: Sequence[int], num_accepted: int, num_verified: int = 7, dies: bool = False) -> Script:
    """Say the first token alone, then `num_accepted` drafts and one more in one step, then the rest one by one."""

    async def script(start: Start) -> AsyncIterator[SequenceDelta]:
        one, *rest = deltas(start, token_ids, None)
        yield one
        counts = decode_service_pb2.DraftCounts(
            verified=num_verified, accepted=num_accepted, predicted=num_verified - 1, predicted_accepted=num_accepted
        )
        step = SequenceDelta(key=start.key, token_ids=token_ids[1 : num_accepted + 2], drafts=counts)
        for delta in rest[: num_accepted + 1]:
            step.logprobs.extend(delta.logprobs)
        yield step
        if dies:
            await forever()
        for delta in rest[num_accepted + 1 :]:
            yield delta
        yield SequenceDelta(key=start.key, finish_reason=STOP)

    return script


async def test_prediction_reaches_the_worker_and_usage(bench: MakeBench) -> None:
    async with bench() as b:
        b.decode.script = drafting([*b.ids(EXPECTED), END], num_accepted=4)
        answer = await b.client.chat.completions.create(**CHAT, prediction={"type": "content", "content": EXPECTED})
        assert list(b.decode.started[0].speculation.prediction) == b.ids(EXPECTED)
        assert not b.decode.started[0].speculation.is_disabled
        assert answer.choices[0].message.content == EXPECTED
        assert answer.usage is not None
        assert answer.usage.completion_tokens == len(b.ids(EXPECTED)) + 1
        details = answer.usage.completion_tokens_details
        assert details is not None
        assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (4, 2)


async def test_prediction_of_parts_is_one_text_for_all_choices(bench: MakeBench) -> None:
    async with bench() as b:
        b.decode.script = drafting([*b.ids(EXPECTED), END], num_accepted=2)
        parts: Any = [{"type": "text", "text": "hello"}, {"type": "text", "text": " world"}]
        answer = await b.client.chat.completions.create(**CHAT, prediction={"type": "content", "content": parts}, n=3)
        assert [list(start.speculation.prediction) for start in b.decode.started] == [b.ids("hello world")] * 3
        assert answer.usage is not None
        details = answer.usage.completion_tokens_details
        assert details is not None
        assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (6, 12)


@pytest.mark.parametrize(
    "value", ["text", {"type": "text", "content": "x"}, {"type": "content"}, {"type": "content", "content": [{}]}]
)
async def test_prediction_of_another_form_is_rejected(bench: MakeBench, value: Any) -> None:
    async with bench() as b:
        status, error = await b.refused("/v1/chat/completions", messages=MESSAGES, prediction=value)
        assert (status, error["param"]) == (400, "prediction")


@pytest.mark.parametrize("num_letters", [CONTEXT + 200, 100_000])
async def test_prediction_beyond_the_context_is_rejected(bench: MakeBench, num_letters: int) -> None:
    async with bench() as b:
        prediction = {"type": "content", "content": "z" * num_letters}
        status, error = await b.refused("/v1/chat/completions", messages=MESSAGES, prediction=prediction)
        assert (status, error["param"]) == (400, "prediction.content")
        assert b.decode.started == []


async def test_migration_keeps_the_prediction_and_adds_counts(
    bench: MakeBench, heard: None, caplog: pytest.LogCaptureFixture
) -> None:
    async with bench(num_decoders=2) as b:
        log = Log(caplog)
        ids = [*b.ids(EXPECTED), END]
        b.decode.script = drafting(ids, num_accepted=2, dies=True)
        rest = answering(ids)

        async def second(start: Start) -> AsyncIterator[SequenceDelta]:
            async for delta in rest(start):
                counts = decode_service_pb2.DraftCounts(verified=1, predicted=1)
                yield SequenceDelta(key=delta.key, token_ids=delta.token_ids, drafts=counts)
            yield SequenceDelta(key=start.key, finish_reason=STOP)

        b.decoders[1].script = second
        body = {**CHAT, "prediction": {"type": "content", "content": EXPECTED}}
        response, _ = await asyncio.gather(b.http.post("/v1/chat/completions", json=body), kill_after(b.decode))
        assert response.json()["choices"][0]["message"]["content"] == EXPECTED
        first, resumed = b.decode.started[0], b.decoders[1].started[0]
        assert resumed.resumed_tokens == 4
        assert resumed.speculation == first.speculation
        num_resumed = len(ids) - 4
        details = response.json()["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] == 2
        assert details["rejected_prediction_tokens"] == 4 + num_resumed
        _, fields = await log.next()
        assert (fields["drafted"], fields["accepted"]) == (str(7 + num_resumed), "2")


async def test_drafts_behind_a_stop_string_are_rejected(bench: MakeBench) -> None:
    async with bench() as b:
        ids = b.ids(EXPECTED)
        b.decode.script = drafting([*ids, END], num_accepted=len(ids) - 2, num_verified=len(ids))
        answer = (
            await b.http.post(
                "/v1/chat/completions",
                json={**CHAT, "stop": ["world"], "prediction": {"type": "content", "content": EXPECTED}},
            )
        ).json()
        assert answer["choices"][0]["message"]["content"] == "hello "
        usage = answer["usage"]
        details = usage["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] == usage["completion_tokens"] - 1
        assert details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"] == len(ids) - 1


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 9}),
        ("/v1/responses", {"input": "hello"}),
    ],
)
async def test_every_api_passes_the_switch(bench: MakeBench, path: str, fields: dict[str, Any]) -> None:
    async with bench() as b:
        b.decode.script = answering([*b.ids("hello"), END])
        for is_on in (False, True):
            await b.http.post(path, json={"model": MODEL_NAME, **fields, "speculation": is_on})
        assert [start.speculation.is_disabled for start in b.decode.started] == [True, False]


async def test_grpc_passes_switch_and_prediction(bench: MakeBench) -> None:
    async with bench() as b, stub_of(b) as stub:
        b.decode.script = drafting([*b.ids(EXPECTED), END], num_accepted=3)
        messages = [pb.ChatMessage(role="user", content="hello")]
        for options in pb.GenerationOptions(prediction=EXPECTED), pb.GenerationOptions(speculation=False):
            pieces = [piece async for piece in stub.Chat(pb.ChatRequest(messages=messages, options=options))]
            usage = pieces[-1].usage
            assert (usage.accepted_prediction_tokens, usage.rejected_prediction_tokens) == (3, 3)
        on, off = b.decode.started
        assert list(on.speculation.prediction) == b.ids(EXPECTED)
        assert off.speculation.is_disabled
