"""Logprobs of whole answers: so many that one request cannot fill the gateway's memory."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.services.gateway.conftest import MODEL_NAME, MakeBench
from tests.services.gateway.test_grpc import stub_of
from weft_mesh.v1 import inference_service_pb2 as pb
from weft_services.gateway.mesh import prepare

ASKED: dict[str, Any] = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "MAX_ANSWER_LOGPROBS", 120)


async def test_answers_with_more_logprobs_than_there_is_room_for_are_refused(bench: MakeBench) -> None:
    async with bench() as b:
        with pytest.raises(openai.BadRequestError) as caught:
            await b.client.chat.completions.create(**ASKED, n=2, logprobs=True, top_logprobs=5, max_tokens=11)
        assert caught.value.param == "max_tokens"
        assert "at most 10 tokens" in str(caught.value)
        assert b.scheduler.routed == []


async def test_answers_that_fit_are_given_and_one_without_a_length_ends_where_the_room_does(bench: MakeBench) -> None:
    async with bench() as b:
        await b.client.chat.completions.create(**ASKED, n=2, logprobs=True, top_logprobs=5, max_tokens=10)
        await b.client.chat.completions.create(**ASKED, n=2, logprobs=True, top_logprobs=5)
        assert {start.sampling.max_tokens for start in b.decode.started} == {10}


async def test_what_is_streamed_or_has_no_logprobs_is_not_bound(bench: MakeBench) -> None:
    async with bench() as b:
        stream = await b.client.chat.completions.create(
            **ASKED, logprobs=True, top_logprobs=5, max_tokens=200, stream=True
        )
        async for _ in stream:
            pass
        await b.client.chat.completions.create(**ASKED, max_tokens=200)
        async with stub_of(b) as stub:
            options = pb.GenerationOptions(num_logprobs=5, max_tokens=200)
            chat = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="hello")], options=options)
            for call in stub.Generate(pb.GenerateRequest(text="x", options=options)), stub.Chat(chat):
                async for _ in call:
                    pass
        assert [start.sampling.max_tokens for start in b.decode.started] == [200] * 4
