"""LiteLLM against a whole mesh; runs where LiteLLM is, by `test_whole_mesh.py`."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any, Literal

import litellm
import pytest
from litellm import acompletion, aembedding, atext_completion, stream_chunk_builder
from pydantic import BaseModel

FRONT: dict[str, Any] = {
    "model": f"openai/{os.environ['WEFT_MODEL_NAME']}",
    "api_base": os.environ["WEFT_URL"] + "/v1",
    "api_key": os.environ["WEFT_KEY"],
    "max_retries": 0,
    "timeout": 60,
    "temperature": 0,
}
# so long that workers differ by what they hold of it: of a few blocks, the scheduler lets nobody wait for the holder
RULES = {"role": "system", "content": "Answer in one word, as a port would log it. " * 40}
QUESTION = [RULES, {"role": "user", "content": "What is the weather in Oslo?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}


class Place(BaseModel):
    """One of two, as weft-nano finds no end to a text of its own."""

    city: Literal["Oslo", "Rome"]


def ask(is_streamed: bool, **fields: Any) -> Any:
    """A whole answer, or what LiteLLM joins the chunks to."""

    async def collect() -> list[Any]:
        options = {"include_usage": True}
        stream = await acompletion(messages=QUESTION, stream=True, stream_options=options, **FRONT | fields)
        return [chunk async for chunk in stream]

    if not is_streamed:
        return asyncio.run(acompletion(messages=QUESTION, **FRONT | fields))
    return stream_chunk_builder(asyncio.run(collect()), messages=QUESTION)


def test_a_stream_joins_to_the_whole_answer() -> None:
    whole, joined = ask(False, max_completion_tokens=24), ask(True, max_completion_tokens=24)
    assert whole.choices[0].message.content == joined.choices[0].message.content != ""
    assert whole.choices[0].finish_reason == joined.choices[0].finish_reason
    assert whole.usage.total_tokens == joined.usage.total_tokens
    assert joined.usage.prompt_tokens_details.cached_tokens > 0


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_a_forced_call_has_its_arguments(is_streamed: bool) -> None:
    answer = ask(is_streamed, tools=[TOOL], tool_choice="required", max_completion_tokens=120)
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) >= {"city"}


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_structured_output(is_streamed: bool) -> None:
    answer = ask(is_streamed, response_format=Place, max_completion_tokens=300)
    Place.model_validate_json(answer.choices[0].message.content)


def test_text_completions_and_embeddings() -> None:
    fields = FRONT | {"model": FRONT["model"].replace("openai/", "text-completion-openai/")}
    assert asyncio.run(atext_completion(prompt="The river", max_tokens=8, **fields)).choices[0].text
    fields = {name: value for name, value in FRONT.items() if name != "temperature"}
    vectors = asyncio.run(aembedding(input=["river"], encoding_format="float", **fields)).data
    assert len(vectors[0]["embedding"]) > 100


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"model": "openai/other"}, litellm.NotFoundError),
        ({"api_key": "wrong"}, litellm.AuthenticationError),
        ({"max_tokens": 10**6}, litellm.BadRequestError),
    ],
    ids=["404", "401", "400"],
)
def test_errors_have_the_right_kind(fields: Any, kind: Any) -> None:
    with pytest.raises(kind):
        ask(False, **fields)
