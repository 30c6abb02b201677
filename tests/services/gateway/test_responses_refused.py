"""What /v1/responses does not take: refused by the name that the client wrote."""

from __future__ import annotations

from typing import Any

import pytest
from openai import BadRequestError, NotFoundError

from tests.services.gateway.conftest import MakeBench
from tests.services.gateway.test_responses import ASKED, TOOL, client

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"store": True}, "store"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"truncation": "auto"}, "truncation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"moderation": {"model": "omni-moderation-latest"}}, "moderation"),
    ({"prompt_cache_options": {"mode": "explicit", "prewarm": True}}, "prompt_cache_options.prewarm"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": None}, "input"),
    ({"input": "refuse me"}, "input"),
    ({"input": "x" * 100_000}, "input"),
    ({"input": [5]}, "input.0"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input.0.role"),
    ({"input": [{"role": "user", "content": "x", "id": [None]}]}, "input.0.id"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0"),
    ({"input": [{"role": "user", "content": [{"type": {}, "text": "x"}]}]}, "input.0.content.0"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0"),
    ({"input": [{"type": "mesage", "role": "user", "content": "x"}]}, "input.0.type"),
    ({"input": [{"type": {}, "id": "x"}]}, "input.0.type"),
    ({"input": [{"role": "user", "content": "x"}, {"type": "compaction_trigger"}]}, "input.1.type"),
    ({"input": [{"type": "web_search_call", "id": "ws_1", "status": "completed"}]}, "input"),
    ({"input": [{"type": "custom_tool_call", "call_id": "1", "name": "f", "input": 5}]}, "input.0"),
    ({"input": [{"role": "user", "content": "x"}, {"type": "function_call", "call_id": "1"}]}, "input.1"),
    ({"input": [{"type": "function_call", "call_id": "1", "name": "f", "namespace": [5]}]}, "input.0.namespace"),
    ({"instructions": 5}, "instructions"),
    ({"instructions": {}}, "instructions"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 100_000}, "max_output_tokens"),
    ({"temperature": 7}, "temperature"),
    ({"top_logprobs": 99}, "top_logprobs"),
    ({"include": "all"}, "include"),
    ({"reasoning": "high"}, "reasoning"),
    ({"reasoning": {"effort": 5}}, "reasoning.effort"),
    ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 5}}}}, "text.format.schema"),
    ({"tools": [{"type": "web_search"}, {**TOOL, "type": "functions"}]}, "tools.1.type"),
    ({"tools": [{"type": "web_search"}, {"name": "x"}]}, "tools.1.type"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL, {"type": "mcp"}], "tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "custom", "name": "later"}}, "tool_choice"),
    (
        {
            "tools": [TOOL, {"type": "mcp"}],
            "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]},
        },
        "tool_choice",
    ),
    ({"tools": [{"type": "web_search"}, {"type": "function", "name": ""}]}, "tools.1"),
    ({"tools": [{"type": "namespace", "tools": [TOOL]}]}, "tools.0.name"),
    ({"tools": [{"type": "namespace", "name": "x"}]}, "tools.0.tools"),
    ({"tools": [TOOL, {"type": "namespace", "name": "x", "tools": [{"type": "custom"}]}]}, "tools.1.tools.0"),
    ({"tools": [TOOL, {"type": "namespace", "name": "x", "tools": [{**TOOL, "name": 5}]}]}, "tools.1.tools.0"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "later"}}, "tool_choice"),
    ({"user": False}, "user"),
    ({"safety_identifier": 5}, "safety_identifier"),
    ({"metadata": {"a": 5}}, "metadata"),
    ({"metadata": {"a" * 65: "b"}}, "metadata"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"bad_words": ["a"]}, "bad_words"),
    ({"cache_salt": "mine"}, "cache_salt"),
    ({"guided_json": "{"}, "guided_json"),
]


async def test_what_is_wrong_is_named_as_the_client_wrote_it(bench: MakeBench) -> None:
    async with bench(tool_format="hermes") as b:
        for fields, param in WRONG:
            status, error = await b.refused("/v1/responses", **{"input": "x", **fields})
            assert (status, error["param"]) == (400, param), fields
            assert param in error["message"] or fields.get("input") == "refuse me"
        assert not b.decode.started


async def test_errors_are_what_the_sdk_raises(bench: MakeBench) -> None:
    async with bench() as b, client(b) as sdk:
        with pytest.raises(BadRequestError, match="store"):
            await sdk.responses.create(**ASKED, store=True)
        with pytest.raises(NotFoundError):
            await sdk.responses.create(model="other", input="x")
        with pytest.raises(NotFoundError):
            await sdk.responses.retrieve("resp_1")
