"""/v1/messages through Anthropic's own SDK: messages, its stream accumulator, tools, errors, counting."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic
from pydantic import BaseModel

from tests.services.gateway.conftest import END, MODEL_NAME, Bench, MakeBench, tiny_tokenizer, write_model
from tests.services.gateway.fakes import LENGTH, SequenceDelta, Start, deltas, failing, speaking

USER: Any = {"role": "user", "content": "weather?"}
TOOLS: Any = [{"name": "now", "description": "time", "input_schema": {"type": "object", "properties": {}}}]
CALL = 'Hm.\n<tool_call>{"name": "now", "arguments": {"zone": "utc"}}</tool_call>'


@asynccontextmanager
async def client(b: Bench) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(
        base_url=b.url, api_key="none", max_retries=0, timeout=20, _strict_response_validation=True
    ) as sdk:
        yield sdk


async def test_a_message_and_what_it_cost(bench: MakeBench) -> None:
    async with bench() as b, client(b) as sdk:
        b.decode.script = speaking([*b.ids("hello world"), END], cached=3)
        asked: Any = {"model": MODEL_NAME, "max_tokens": 9, "messages": [USER], "system": "Be brief."}
        answer = await sdk.messages.create(**asked, extra_body={"temperature": 0.5, "top_k": 7})
        assert [block.text for block in answer.content if block.type == "text"] == ["hello world"]
        assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
        start = b.decode.started[0]
        assert answer.usage.cache_read_input_tokens == 3
        assert answer.usage.input_tokens == len(start.token_ids) - 3
        assert answer.usage.output_tokens == len(b.ids("hello world")) + 1
        assert (start.sampling.max_tokens, start.sampling.top_k, start.sampling.temperature) == (9, 7, 0.5)
        prompt = b.tokenizer.decode(list(start.token_ids), skip_special_tokens=False)
        assert "<|im_start|>system\nBe brief.<|im_end|>" in prompt
        counted = await sdk.messages.count_tokens(model=MODEL_NAME, messages=[USER], system="Be brief.")
        assert counted.input_tokens == len(start.token_ids)


async def test_the_sdks_accumulator_joins_text_and_tool_use(bench: MakeBench) -> None:
    async with bench(tool_format="hermes") as b, client(b) as sdk:
        b.decode.script = speaking([*b.ids(CALL), END], cached=2)
        asked: Any = {"model": MODEL_NAME, "max_tokens": 99, "messages": [USER], "tools": TOOLS}
        async with sdk.messages.stream(**asked) as stream:
            kinds = [event.type async for event in stream]
            answer: Any = await stream.get_final_message()
        assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
        assert [block.type for block in answer.content] == ["text", "tool_use"]
        assert answer.content[0].text == "Hm."
        assert (answer.content[1].name, answer.content[1].input) == ("now", {"zone": "utc"})
        assert answer.stop_reason == "tool_use"
        assert answer.usage.cache_read_input_tokens == 2
        assert answer.usage.input_tokens == len(b.decode.started[0].token_ids) - 2
        whole: Any = await sdk.messages.create(**asked)
        assert [block.type for block in whole.content] == ["text", "tool_use"]
        assert whole.content[1].input == {"zone": "utc"}
        # and the conversation goes on
        result = {
            "type": "tool_result",
            "tool_use_id": answer.content[1].id,
            "content": [{"type": "text", "text": "noon"}],
        }
        messages: Any = [USER, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
        await sdk.messages.create(**{**asked, "messages": messages})
        prompt = b.tokenizer.decode(list(b.decode.started[-1].token_ids), skip_special_tokens=False)
        assert '"zone": "utc"' in prompt
        assert "<|im_start|>tool\nnoon<|im_end|>" in prompt


FAILED: Any = {"type": "tool_result", "tool_use_id": "toolu_1", "is_error": True}


async def test_the_model_is_told_that_a_tool_failed(bench: MakeBench) -> None:
    async with bench() as b, client(b) as sdk:
        contents: list[Any] = [{"content": "no such file"}, {"content": [{"type": "text", "text": "error: none"}]}, {}]
        results: Any = [*({**FAILED, **each} for each in contents), {**FAILED, "is_error": False, "content": "noon"}]
        asked: Any = [USER, {"role": "user", "content": results}]
        await sdk.messages.create(model=MODEL_NAME, max_tokens=9, messages=asked)
        prompt = b.tokenizer.decode(list(b.decode.started[0].token_ids), skip_special_tokens=False)
        told = [turn.partition("<|im_end|>")[0] for turn in prompt.split("<|im_start|>tool\n")[1:]]
        assert told == ["Error: no such file", "error: none", "Error: ", "noon"]


@pytest.mark.parametrize(
    ("choice", "is_forced"),
    [({"type": "any"}, True), ({"type": "tool", "name": "now"}, True), ({"type": "auto"}, False)],
)
async def test_tool_choice_is_understood(bench: MakeBench, choice: Any, is_forced: bool) -> None:
    async with bench(tool_format="hermes") as b, client(b) as sdk:
        await sdk.messages.create(model=MODEL_NAME, max_tokens=9, messages=[USER], tools=TOOLS, tool_choice=choice)
        assert b.decode.started[0].sampling.HasField("grammar") == is_forced


async def test_why_it_ended(bench: MakeBench) -> None:
    async with bench() as b, client(b) as sdk:
        b.decode.script = speaking(b.ids("hello"), LENGTH)
        asked: Any = {"model": MODEL_NAME, "max_tokens": 9, "messages": [USER]}
        assert (await sdk.messages.create(**asked)).stop_reason == "max_tokens"
        b.decode.script = speaking([*b.ids("hello STOP more"), END])
        stopped = await sdk.messages.create(**asked, stop_sequences=["STOP"])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "STOP")
        several = {**asked, "stop_sequences": ["never", "more", "STOP"]}
        stopped = await sdk.messages.create(**several)
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "STOP"), "which of them it was"
        async with sdk.messages.stream(**several) as stream:
            streamed = await stream.get_final_message()
        assert (streamed.stop_reason, streamed.stop_sequence) == ("stop_sequence", "STOP")
        b.decode.script = speaking([*b.ids("hello"), END])
        ended = await sdk.messages.create(**several)
        assert (ended.stop_reason, ended.stop_sequence) == ("end_turn", None)


SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


async def test_an_output_format_binds_the_answer_as_response_format_does(bench: MakeBench) -> None:
    async with bench() as b, client(b) as sdk:
        asked: Any = {"model": MODEL_NAME, "max_tokens": 99, "messages": [USER]}
        wanted: Any = {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "low"}
        b.decode.script = speaking([*b.ids('{"city": "Oslo"}'), END])
        await sdk.messages.create(**asked, output_config=wanted)
        chat_format: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        await b.client.chat.completions.create(model=MODEL_NAME, messages=[USER], response_format=chat_format)
        by_anthropic, by_openai = (start.sampling.grammar.text for start in b.decode.started)
        assert by_anthropic == by_openai != ""


class City(BaseModel):
    """What the SDK turns into a schema."""

    city: str


async def test_the_sdk_parses_an_answer_into_its_class(bench: MakeBench) -> None:
    async with bench() as b, client(b) as sdk:
        b.decode.script = speaking([*b.ids('{"city": "Oslo"}'), END])
        answer = await sdk.messages.parse(model=MODEL_NAME, max_tokens=99, messages=[USER], output_format=City)
        assert answer.parsed_output == City(city="Oslo")
        assert b.decode.started[0].sampling.HasField("grammar")


async def test_a_template_is_told_whether_to_think(bench: MakeBench, tmp_path: Path) -> None:
    template = "{{ messages[0].content }} {{ enable_thinking }} {{ thinking }} {{ reasoning_effort }}"
    model = str(write_model(tmp_path, tiny_tokenizer(), template))
    async with bench(model=model) as b, client(b) as sdk:
        asked: Any = {"model": MODEL_NAME, "max_tokens": 9, "messages": [USER]}
        kinds: list[Any] = [
            {"type": "disabled"},
            {"type": "enabled", "budget_tokens": 1024},
            {"type": "adaptive", "display": "omitted"},
        ]
        for kind in kinds:
            await sdk.messages.create(**asked, thinking=kind, output_config={"effort": "high"})
        prompts = [b.tokenizer.decode(list(start.token_ids)) for start in b.decode.started]
        assert [prompt.split()[1:] for prompt in prompts] == [
            [told, told, "high"] for told in ("False", "True", "True")
        ]


async def test_what_an_agent_sends_habitually_is_taken(bench: MakeBench) -> None:
    async with bench() as b:
        body = {
            "model": MODEL_NAME,
            "max_tokens": 9,
            "messages": [USER],
            "mcp_servers": [],
            "metadata": {"user_id": "u"},
            "service_tier": "auto",
            "speed": "fast",
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "tools": [{**TOOLS[0], "type": None, "eager_input_streaming": True}],
        }
        response = await b.http.post("/v1/messages?beta=true", json=body)
        assert response.status_code == 200, response.text
        counted = await b.http.post("/v1/messages/count_tokens?beta=true", json=body)
        assert counted.json()["input_tokens"] == len(b.decode.started[0].token_ids)


async def test_the_sdk_finds_the_requests_id(bench: MakeBench) -> None:
    async with bench() as b, client(b) as sdk:
        asked: Any = {"model": MODEL_NAME, "max_tokens": 9, "messages": [USER]}
        answer = await sdk.messages.create(**asked, extra_headers={"x-request-id": "mine-1"})
        assert answer._request_id == "mine-1"
        with pytest.raises(anthropic.NotFoundError) as missing:
            await sdk.messages.create(**{**asked, "model": "other"})
        assert missing.value.request_id
        assert missing.value.request_id == missing.value.response.headers["x-request-id"]
        assert "request-id" not in (await b.http.get("/v1/models")).headers


async def test_errors_are_what_the_sdk_raises(bench: MakeBench) -> None:
    async with bench(migration_timeout_seconds=0.2) as b, client(b) as sdk:
        asked: Any = {"model": MODEL_NAME, "max_tokens": 9, "messages": [USER]}
        with pytest.raises(anthropic.BadRequestError, match="temperature"):
            await sdk.messages.create(**asked, extra_body={"temperature": 7.0})
        with pytest.raises(anthropic.BadRequestError, match=r"messages\.0"):
            await sdk.messages.create(**{**asked, "messages": [{"role": "user", "content": [{"type": "image"}]}]})
        with pytest.raises(anthropic.NotFoundError):
            await sdk.messages.create(**{**asked, "model": "other"})
        b.decode.script = failing(13)
        with pytest.raises(anthropic.InternalServerError) as failure:
            await sdk.messages.create(**asked)
        body: Any = failure.value.body
        assert (body["type"], body["error"]["type"]) == ("error", "api_error")


@pytest.mark.parametrize(
    ("code", "status", "kind"), [(8, 429, "rate_limit_error"), (14, 503, "overloaded_error")], ids=["full", "lost"]
)
async def test_errors_have_anthropics_names_whole_and_in_a_stream(
    bench: MakeBench, code: int, status: int, kind: str
) -> None:
    async with bench(migration_timeout_seconds=0.2) as b, client(b) as sdk:
        asked: Any = {"model": MODEL_NAME, "max_tokens": 9, "messages": [USER]}
        b.decode.script = failing(code)
        with pytest.raises(anthropic.APIStatusError) as refusal:
            await sdk.messages.create(**asked)
        body: Any = refusal.value.body
        assert (refusal.value.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)
        assert refusal.value.response.headers["retry-after"] == "1"

        async def breaking(start: Start) -> AsyncIterator[SequenceDelta]:
            for delta in deltas(start, b.ids("hello"), None):
                yield delta
            b.scheduler.decoders = []
            async for failure in failing(code)(start):
                yield failure

        b.decode.script = breaking
        response = await b.http.post("/v1/messages", json={**asked, "stream": True})
        last = response.text.rstrip("\n").split("\n\n")[-1]
        assert last.startswith("event: error\ndata: ")
        assert json.loads(last.partition("data: ")[2])["error"]["type"] == kind


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"system": 5}, "system"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences"),
        ({"tools": [{"type": "bash"}]}, "tools.0"),
        ({"tools": [{"input_schema": {}}]}, "tools.0: name must be"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "messages.0: name must be"),
        ({"tools": TOOLS, "tool_choice": {"type": "all"}}, "tool_choice.type"),
        ({"tools": [{**TOOLS[0], "input_schema": [5]}]}, "tools.0.input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"container": "c"}, "container"),
        ({"compaction": {}}, "compaction"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits.0"),
        ({"mcp_servers": [{"type": "url", "url": "https://x", "name": "y"}]}, "mcp_servers"),
        ({"messages": [{"role": "user", "content": [{**FAILED, "is_error": "yes"}]}]}, "messages.0.content.0.is_error"),
        ({"output_config": []}, "output_config"),
        ({"output_config": {"effort": 5}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema", "schema": 5}}}, "output_config.format.schema"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format.schema"),
        ({"output_format": {"type": "json_schema", "schema": {}}}, "output_format"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"thinking": "adaptive"}, "thinking"),
        ({"thread": {"type": "create"}}, "thread"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_json": "{"}, "guided_json"),
        ({"cache_salt": "mine"}, "cache_salt"),
        ({"n": 2}, "n"),
        ({"priority": 99}, "priority"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
)
async def test_a_bad_field_is_named(bench: MakeBench, fields: dict[str, Any], named: str) -> None:
    async with bench() as b:
        body = {"model": MODEL_NAME, "max_tokens": 9, "messages": [USER], **fields}
        response = await b.http.post("/v1/messages", json=body)
        error = response.json()
        assert (response.status_code, error["type"], error["error"]["type"]) == (400, "error", "invalid_request_error")
        assert named in error["error"]["message"]
