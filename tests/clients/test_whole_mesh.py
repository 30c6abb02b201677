"""The same clients against a whole mesh of processes, weft-nano as its model, so that what is checked is the form of
answers, what they cost, and that they hang together; what a model says is for the tests with an echo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import httpx
import jsonschema  # type: ignore[import-untyped]
import pytest
from anthropic import AsyncAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from openai import AsyncOpenAI
from pydantic import BaseModel, SecretStr

from tests.clients.scene import MODEL_NAME, Door
from tests.clients.test_litellm import PYTHON
from tests.clients.test_node import NODE
from tests.clients.test_openapi import schemathesis
from tests.mesh.conftest import Mesh

HERE = Path(__file__).parent
Whole = tuple[Mesh, Door]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
QUESTION: Any = {"role": "user", "content": "What is the weather in Oslo?"}
# so long that workers differ by what they hold of it: of a few blocks, the scheduler lets nobody wait for the holder
RULES: Any = {"role": "system", "content": "Answer in one word, as a port would log it. " * 40}
FIELDS: dict[str, Any] = {"model": MODEL_NAME, "temperature": 0}
HIDDEN_SIZE = 256
pytestmark = pytest.mark.timeout(240)


class Place(BaseModel):
    """One of two, as weft-nano finds no end to a text of its own."""

    city: Literal["Oslo", "Rome"]


def openai_of(door: Door) -> AsyncOpenAI:
    return AsyncOpenAI(
        base_url=f"{door.url}/v1", api_key=door.key, max_retries=0, timeout=60, _strict_response_validation=True
    )


async def test_openai_whole_and_streamed(whole_mesh: Whole) -> None:
    async with openai_of(whole_mesh[1]) as sdk:
        asked = {**FIELDS, "messages": [RULES, QUESTION], "max_tokens": 24}
        whole = await sdk.chat.completions.create(**asked)
        async with sdk.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
            joined: Any = await stream.get_final_completion()
        assert whole.choices[0].message.content
        assert joined.choices[0].message.content == whole.choices[0].message.content
        assert joined.choices[0].finish_reason == whole.choices[0].finish_reason
        assert whole.usage is not None
        assert joined.usage.total_tokens == whole.usage.total_tokens
        assert joined.usage.prompt_tokens_details.cached_tokens > 0, "the prompt was computed a moment ago"


async def test_openai_tools_and_formats(whole_mesh: Whole) -> None:
    function = {"name": "get_weather", "parameters": SCHEMA, "strict": True}
    asked: dict[str, Any] = {**FIELDS, "messages": [QUESTION], "max_tokens": 120}
    asked |= {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    async with openai_of(whole_mesh[1]) as sdk:
        whole: Any = await sdk.chat.completions.create(**asked)
        async with sdk.chat.completions.stream(**asked) as stream:
            streamed: Any = await stream.get_final_completion()
        for answer in (whole, streamed):
            assert answer.choices[0].finish_reason == "tool_calls"
            (call,) = answer.choices[0].message.tool_calls
            assert call.function.name == "get_weather"
            jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
        result = {"role": "tool", "tool_call_id": whole.choices[0].message.tool_calls[0].id, "content": "rain"}
        asked["messages"] = [QUESTION, whole.choices[0].message.model_dump(exclude_none=True), result]
        further: Any = await sdk.chat.completions.create(**asked)
        assert further.usage.prompt_tokens > whole.usage.prompt_tokens
        parsed = await sdk.chat.completions.parse(
            **FIELDS, messages=[QUESTION], response_format=Place, max_tokens=200, seed=1
        )
        assert isinstance(parsed.choices[0].message.parsed, Place)


async def test_openai_responses_and_embeddings(whole_mesh: Whole) -> None:
    async with openai_of(whole_mesh[1]) as sdk:
        asked: dict[str, Any] = {**FIELDS, "input": "Who are you?", "max_output_tokens": 24}
        whole = await sdk.responses.create(**asked)
        async with sdk.responses.stream(**asked) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert kinds[0] == "response.created"
        assert kinds[-1] in ("response.completed", "response.incomplete")
        assert final.output_text == whole.output_text != ""
        further = await sdk.responses.create(**{**asked, "input": "Go on."}, previous_response_id=final.id)
        assert further.usage is not None
        assert final.usage is not None
        assert further.usage.input_tokens > final.usage.input_tokens
        assert await sdk.responses.retrieve(further.id) == further
        await sdk.responses.delete(further.id)
        vectors = await sdk.embeddings.create(model=MODEL_NAME, input=["river", "town"], encoding_format="float")
        assert [len(each.embedding) for each in vectors.data] == [HIDDEN_SIZE] * 2
        assert sum(value**2 for value in vectors.data[0].embedding) == pytest.approx(1, abs=1e-4)


async def test_a_stream_that_is_left_is_cancelled_down_to_the_engine(whole_mesh: Whole) -> None:
    mesh, door = whole_mesh
    before = generated(mesh)
    async with openai_of(door) as sdk:
        asked = {**FIELDS, "messages": [QUESTION], "max_tokens": 1500}
        stream = await sdk.chat.completions.create(**asked, stream=True, extra_body={"ignore_eos": True})
        async with stream:
            assert (await anext(aiter(stream))).choices
    mesh.wait_idle()
    assert generated(mesh) - before < 1500, "it was written to its end for nobody"


def generated(mesh: Mesh) -> float:
    """Tokens, by what workers count."""
    return sum(status.report.generated_tokens for status in mesh.workers().values())


async def test_anthropic(whole_mesh: Whole) -> None:
    door = whole_mesh[1]
    asked: dict[str, Any] = {"model": MODEL_NAME, "max_tokens": 120, "messages": [QUESTION]}
    asked |= {"tools": [{"name": "get_weather", "input_schema": SCHEMA}]}
    async with AsyncAnthropic(
        base_url=door.url, api_key=door.key, max_retries=0, timeout=60, _strict_response_validation=True
    ) as sdk:
        counted = await sdk.messages.count_tokens(**{name: asked[name] for name in ("model", "messages", "tools")})
        message = await sdk.messages.create(**asked, tool_choice={"type": "any"})
        async with sdk.messages.stream(**asked, tool_choice={"type": "any"}) as stream:
            streamed = await stream.get_final_message()
        for each in (message, streamed):
            assert each.stop_reason == "tool_use"
            calls: list[Any] = [block for block in each.content if block.type == "tool_use"]
            jsonschema.validate(calls[0].input, SCHEMA)
            assert each.usage.input_tokens + (each.usage.cache_read_input_tokens or 0) == counted.input_tokens
        async with sdk.messages.stream(model=MODEL_NAME, max_tokens=16, messages=[QUESTION]) as text:
            pieces = [piece async for piece in text.text_stream]
            assert "".join(pieces) == (await text.get_final_message()).content[0].text  # type: ignore[union-attr]


@pytest.mark.parametrize("by_responses", [False, True], ids=["chat", "responses"])
async def test_langchain(whole_mesh: Whole, by_responses: bool) -> None:
    door = whole_mesh[1]
    common: dict[str, Any] = {"model": MODEL_NAME, "base_url": f"{door.url}/v1", "api_key": SecretStr(door.key)}
    async with httpx.AsyncClient(timeout=60) as http:
        common["http_async_client"] = http
        await check_chat(ChatOpenAI(**common, temperature=0, max_completion_tokens=120, use_responses_api=by_responses))
        vectors = await OpenAIEmbeddings(**common, check_embedding_ctx_length=False).aembed_documents(["river"])
    assert len(vectors[0]) == HIDDEN_SIZE


async def check_chat(chat: ChatOpenAI) -> None:
    """A stream, a call and its result, and structured output."""
    streamed: Any = None
    async for chunk in chat.astream("Who are you?"):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed.text == (await chat.ainvoke("Who are you?")).text != ""
    tool = {"title": "get_weather", "description": "The weather in a city.", **SCHEMA}
    answer: Any = await chat.bind_tools([tool], tool_choice="get_weather").ainvoke("What is the weather in Oslo?")
    jsonschema.validate(answer.tool_calls[0]["args"], SCHEMA)
    result = ToolMessage("rain", tool_call_id=answer.tool_calls[0]["id"])
    assert await chat.ainvoke([HumanMessage("What is the weather in Oslo?"), answer, result])
    assert isinstance(await chat.with_structured_output(Place, method="json_schema").ainvoke("Where?"), Place)


async def test_litellm(whole_mesh: Whole) -> None:
    checks = str(HERE / "litellm_mesh_checks.py")
    await whole_mesh[1].run(
        str(PYTHON), "-m", "pytest", "-q", "--noconftest", "-c", "/dev/null", "--rootdir", str(HERE), checks,
        LITELLM_LOCAL_MODEL_COST_MAP="True",
    )  # fmt: skip


async def test_typescript_clients(whole_mesh: Whole) -> None:
    await whole_mesh[1].run("node", "--test", str(NODE / "mesh.checks.mjs"))


async def test_the_mesh_keeps_to_openais_document(whole_mesh: Whole) -> None:
    mesh, door = whole_mesh
    # no answer has to be long to be held to the document; one that is left alone would fill the context
    await schemathesis(door, "--phases", "fuzzing", "--max-examples", "6", "--seed", "1", WEFT_LONGEST_ANSWER="8")
    mesh.wait_idle()
