"""LiteLLM against a gateway whose model repeats what it is told last; runs where LiteLLM is, by `test_litellm.py`."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import litellm
import pytest
from litellm import acompletion, aembedding, atext_completion, stream_chunk_builder
from pydantic import BaseModel

FRONT: dict[str, Any] = {
    "model": f"openai/{os.environ['WEFT_MODEL_NAME']}",
    "api_base": os.environ["WEFT_URL"] + "/v1",
    "api_key": os.environ["WEFT_KEY"],
    "max_retries": 0,
    "timeout": 20,
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "now",
            "description": "The time.",
            "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}},
        },
    }
]
CALLS = (
    'Two.\n<tool_call>{"name": "now", "arguments": {"zone": "utc"}}</tool_call>'
    '\n<tool_call>{"name": "now", "arguments": {}}</tool_call>'
)


class Place(BaseModel):
    """Somewhere."""

    city: str


def told(words: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": words}]


def ask(words: str, **fields: Any) -> Any:
    """A whole answer."""
    return asyncio.run(acompletion(messages=told(words), **FRONT | fields))


def ask_streamed(words: str, **fields: Any) -> Any:
    """What LiteLLM joins the chunks to."""

    async def collect() -> list[Any]:
        options = {"include_usage": True}
        stream = await acompletion(messages=told(words), stream=True, stream_options=options, **FRONT | fields)
        return [chunk async for chunk in stream]

    return stream_chunk_builder(asyncio.run(collect()), messages=told(words))


def test_a_whole_answer_has_text_reason_and_usage() -> None:
    answer = ask("hello world")
    assert answer.choices[0].message.content == "hello world"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens_details.cached_tokens == 8
    assert answer.usage.prompt_tokens + answer.usage.completion_tokens == answer.usage.total_tokens


def test_a_stream_joins_to_the_same() -> None:
    whole = ask("hello world, naïve 🙂")
    joined = ask_streamed("hello world, naïve 🙂")
    assert joined.choices[0].message.content == whole.choices[0].message.content == "hello world, naïve 🙂"
    assert joined.choices[0].finish_reason == "stop"
    for counted in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(joined.usage, counted) == getattr(whole.usage, counted)


def test_an_answer_that_is_cut_off_says_length() -> None:
    answer = ask("one two three four five six", max_completion_tokens=3)
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("length", 3)


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_tools_are_called(is_streamed: bool) -> None:
    answer = ask_streamed(CALLS, tools=TOOLS) if is_streamed else ask(CALLS, tools=TOOLS)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert message.content == "Two."
    called = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]
    assert called == [("now", {"zone": "utc"}), ("now", {})]
    assert len({call.id for call in message.tool_calls}) == 2


def test_the_result_of_a_tool_goes_back() -> None:
    message = ask(CALLS, tools=TOOLS).choices[0].message
    results = [{"role": "tool", "content": "noon", "tool_call_id": call.id} for call in message.tool_calls]
    conversation = [*told(CALLS), message.model_dump(), *results]
    answer = asyncio.run(acompletion(messages=conversation, tools=TOOLS, **FRONT))
    assert answer.choices[0].message.content == "noon"


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_structured_output(is_streamed: bool) -> None:
    words, fields = '{"city": "Rome"}', {"response_format": Place}
    answer = ask_streamed(words, **fields) if is_streamed else ask(words, **fields)
    assert Place.model_validate_json(answer.choices[0].message.content) == Place(city="Rome")


def test_text_completions_and_embeddings() -> None:
    fields = FRONT | {"model": FRONT["model"].replace("openai/", "text-completion-openai/")}
    answer = asyncio.run(atext_completion(prompt="hello", **fields))
    assert answer.choices[0].text == "hello"
    vectors = asyncio.run(aembedding(input=["hello", "world"], encoding_format="float", **FRONT)).data
    assert [len(each["embedding"]) for each in vectors] == [3, 3]


@pytest.mark.parametrize(
    ("words", "fields", "kind", "says"),
    [
        ("hi", {"temperature": 9}, litellm.BadRequestError, "temperature"),
        ("hi", {"model": "openai/other"}, litellm.NotFoundError, "other"),
        ("hi", {"api_key": "wrong"}, litellm.AuthenticationError, "key"),
        ("many " * 4000, {}, litellm.ContextWindowExceededError, "2048"),
        ("fail 8", {}, litellm.RateLimitError, ""),
        ("fail 13", {}, litellm.InternalServerError, "internal error"),
    ],
    ids=["400", "404", "401", "too long", "429", "500"],
)
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_errors_have_the_right_kind(words: str, fields: Any, kind: Any, says: str, is_streamed: bool) -> None:
    with pytest.raises(kind, match=says):
        (ask_streamed if is_streamed else ask)(words, **fields)


def test_a_stream_that_fails_on_the_way_raises() -> None:
    with pytest.raises(litellm.ServiceUnavailableError, match="internal error"):
        ask_streamed("Something goes wrong here: now")


def test_a_stream_can_be_left() -> None:
    async def leave() -> str:
        stream = await acompletion(messages=told("And so on"), stream=True, **FRONT)
        async for chunk in stream:
            if words := chunk.choices[0].delta.content:
                await stream.aclose()
                return str(words)
        raise AssertionError("the stream ended")

    assert "And so on".startswith(asyncio.run(leave()))
