"""weft-nano calls tools through the whole mesh and the official client: by itself, by force, streamed and not."""

from __future__ import annotations

import json
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from tests.mesh.conftest import Mesh
from tests.mesh.test_formats import asker

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "The weather in a city.", "parameters": SCHEMA},
    }
]
ASKED: dict[str, Any] = {
    "model": "weft-nano",
    "messages": [{"role": "user", "content": "What is the weather in Oslo?"}],
    "tools": TOOLS,
    "max_tokens": 120,
    "temperature": 0,
}


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "get_weather"}}])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_is_called(mesh: Mesh, choice: Any, stream: bool) -> None:
    async with asker(mesh) as client:
        if stream:
            async with client.chat.completions.stream(**ASKED, tool_choice=choice) as running:
                answer: Any = await running.get_final_completion()
        else:
            answer = await client.chat.completions.create(**ASKED, tool_choice=choice)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls", message
    call = message.tool_calls[0]
    assert call.function.name == "get_weather"
    if choice != "auto":
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)


async def test_the_answer_to_a_call_is_read(mesh: Mesh) -> None:
    async with asker(mesh) as client:
        first: Any = await client.chat.completions.create(**ASKED, tool_choice="required")
        call = first.choices[0].message
        result = {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": '{"sky": "clear"}'}
        messages = [*ASKED["messages"], call.model_dump(exclude_none=True), result]
        second = await client.chat.completions.create(**{**ASKED, "messages": messages})
    assert second.usage is not None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens
    assert second.choices[0].finish_reason in ("stop", "tool_calls", "length")
