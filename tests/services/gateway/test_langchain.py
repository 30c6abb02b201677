"""langchain-openai as its users set it up: chats, the Responses API, streams, tools, structured output, embeddings."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, SecretStr

from tests.services.gateway.conftest import END, MODEL_NAME, Bench, MakeBench
from tests.services.gateway.fakes import speaking
from tests.services.gateway.test_embeddings import unit, with_prefill

CALL = 'Hm.\n<tool_call>{"name": "now", "arguments": {"zone": "utc"}}</tool_call>'
TOOL: dict[str, Any] = {
    "title": "now",
    "description": "The time.",
    "type": "object",
    "properties": {"zone": {"type": "string"}},
}


class Place(BaseModel):
    """Somewhere."""

    city: str


def chat(b: Bench, by_responses: bool) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL_NAME,
        base_url=f"{b.url}/v1",
        api_key=SecretStr("none"),
        max_retries=0,
        stream_usage=True,
        use_responses_api=by_responses,
        http_async_client=b.http,
    )


@pytest.mark.parametrize("by_responses", [False, True], ids=["chat", "responses"])
async def test_whole_and_streamed_answers(bench: MakeBench, by_responses: bool) -> None:
    async with bench() as b:
        b.decode.script = speaking([*b.ids("hello world"), END], cached=3)
        whole = await chat(b, by_responses).ainvoke("hi")
        streamed: Any = None
        async for chunk in chat(b, by_responses).astream("hi"):
            streamed = chunk if streamed is None else streamed + chunk
        for answer in (whole, streamed):
            assert answer.text == "hello world"
            usage: Any = answer.usage_metadata
            assert usage["input_tokens"] == len(b.decode.started[0].token_ids)
            assert usage["input_token_details"]["cache_read"] == 3


@pytest.mark.parametrize("by_responses", [False, True], ids=["chat", "responses"])
async def test_tools_are_called_and_their_results_go_back(bench: MakeBench, by_responses: bool) -> None:
    async with bench(tool_format="hermes") as b:
        b.decode.script = speaking([*b.ids(CALL), END])
        model = chat(b, by_responses).bind_tools([TOOL])
        answer = await model.ainvoke("what time is it?")
        assert isinstance(answer, AIMessage)
        assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("now", {"zone": "utc"})]
        streamed: Any = None
        async for chunk in model.astream("what time is it?"):
            streamed = chunk if streamed is None else streamed + chunk
        assert [(call["name"], call["args"]) for call in streamed.tool_calls] == [("now", {"zone": "utc"})]
        result = ToolMessage("noon", tool_call_id=answer.tool_calls[0]["id"])
        await model.ainvoke([HumanMessage("what time is it?"), answer, result])
        prompt = b.tokenizer.decode(list(b.decode.started[-1].token_ids), skip_special_tokens=False)
        assert '"zone": "utc"' in prompt
        assert "<|im_start|>tool\nnoon<|im_end|>" in prompt


@pytest.mark.parametrize("by_responses", [False, True], ids=["chat", "responses"])
async def test_structured_output_is_held_to_its_schema(bench: MakeBench, by_responses: bool) -> None:
    async with bench() as b:
        b.decode.script = speaking([*b.ids('{"city": "Rome"}'), END])
        model = chat(b, by_responses).with_structured_output(Place, method="json_schema")
        assert await model.ainvoke("where?") == Place(city="Rome")
        assert '"city"' in b.decode.started[0].sampling.grammar.text


async def test_embeddings(bench: MakeBench) -> None:
    async with bench() as b, with_prefill(b):
        # by itself it would send the ids of another model's tokenizer
        model = OpenAIEmbeddings(
            model=MODEL_NAME,
            base_url=f"{b.url}/v1",
            api_key=SecretStr("none"),
            check_embedding_ctx_length=False,
            http_async_client=b.http,
        )
        (vector,) = await model.aembed_documents(["hello"])
        ids = b.ids("hello")
        assert vector == pytest.approx(unit(len(ids), ids[0], 1), abs=1e-6)
