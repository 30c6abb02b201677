"""/v1/responses as the official client sees it, every object and event validated strictly against its types."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError
from pydantic import BaseModel
from tokenizers import AddedToken, Tokenizer

from tests.services.gateway.conftest import END, MODEL_NAME, TEMPLATE, Bench, MakeBench, tiny_tokenizer, write_model
from tests.services.gateway.fakes import LENGTH, deltas, failing, forever, speaking

TOOL: Any = {
    "type": "function",
    "name": "now",
    "description": "The time.",
    "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}},
    "strict": False,
}
ANSWER = (
    "<think>Let me\nsee.</think>\n\nHm.\n"
    '<tool_call>{"name": "now", "arguments": {"zone": "utc"}}</tool_call>'
    '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
)
ASKED: Any = {"model": MODEL_NAME, "input": "what time is it?"}


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """With tokens of their own around thoughts, as the models that think have them."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in ("<think>", "</think>")])
    return tokenizer


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """A model that thinks, by what its template says."""
    return write_model(tmp_path_factory.mktemp("thinking"), tokenizer, TEMPLATE + "{# <think></think> #}")


def client(b: Bench) -> AsyncOpenAI:
    return AsyncOpenAI(
        base_url=f"{b.url}/v1", api_key="none", max_retries=0, timeout=20, _strict_response_validation=True
    )


def prompt_of(b: Bench, place: int = -1) -> str:
    return str(b.tokenizer.decode(list(b.decode.started[place].token_ids), skip_special_tokens=False))


async def events_of(sdk: AsyncOpenAI, **asked: Any) -> list[Any]:
    return [event async for event in await sdk.responses.create(**asked, stream=True)]


async def test_a_whole_answer_repeats_what_was_asked(bench: MakeBench) -> None:
    async with bench() as b, client(b) as sdk:
        b.decode.script = speaking([*b.ids("hello world"), END], cached=3)
        asked: Any = {"instructions": "Be brief.", "max_output_tokens": 9, "top_p": 0.5, "metadata": {"a": "b"}}
        answer = await sdk.responses.create(**ASKED, **asked)
        assert (answer.status, answer.output_text) == ("completed", "hello world")
        assert answer.output[0].type == "message"
        start = b.decode.started[0]
        usage: Any = answer.usage
        assert (usage.input_tokens, usage.input_tokens_details.cached_tokens) == (len(start.token_ids), 3)
        assert usage.output_tokens == len(b.ids("hello world")) + 1
        assert usage.total_tokens == usage.input_tokens + usage.output_tokens
        assert (answer.instructions, answer.max_output_tokens, answer.metadata) == ("Be brief.", 9, {"a": "b"})
        # what was not asked for is the model's own
        assert (answer.top_p, round(answer.temperature or 0, 3)) == (0.5, 0.7)
        assert (start.sampling.max_tokens, start.sampling.top_p) == (9, 0.5)
        assert prompt_of(b).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nwhat time")


async def test_a_stream_is_a_numbered_sequence_of_items_that_open_grow_and_close(bench: MakeBench) -> None:
    async with bench(tool_format="hermes") as b, client(b) as sdk:
        b.decode.script = speaking([*b.ids(ANSWER), END], cached=2)
        events = await events_of(sdk, **ASKED, tools=[TOOL])
        assert [event.sequence_number for event in events] == list(range(len(events)))
        kinds = [event.type for event in events]
        without_repeats = [kind for kind, last in zip(kinds, [None, *kinds], strict=False) if kind != last]
        text = ["response.output_item.added", "response.content_part.added"]
        text_end = ["response.content_part.done", "response.output_item.done"]
        call = [f"response.function_call_arguments.{end}" for end in ("delta", "done")]
        assert without_repeats == [
            *("response.created", "response.in_progress"),
            *(*text, "response.reasoning_text.delta", "response.reasoning_text.done", *text_end),
            *(*text, "response.output_text.delta", "response.output_text.done", *text_end),
            *(text[0], *call, text_end[1]) * 2,
            "response.completed",
        ]
        final = events[-1].response
        assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
        for index, item in enumerate(final.output):
            mine = [event for event in events if getattr(event, "output_index", None) == index]
            assert mine[-1].item == item, "an item ends as the response has it"
            assert {getattr(event, "item_id", item.id) for event in mine} == {item.id}
            joined = "".join(event.delta for event in mine if event.type.endswith(".delta"))
            done = next(event for event in mine if event.type.endswith(("text.done", "arguments.done")))
            assert joined == (done.text if hasattr(done, "text") else done.arguments)
        assert final.output[0].content[0].text == "Let me\nsee."
        assert final.output_text == "Hm."
        assert [(call.name, json.loads(call.arguments)) for call in final.output[2:]] == [
            ("now", {"zone": "utc"}),
            ("now", {}),
        ]
        assert len({call.call_id for call in final.output[2:]}) == 2
        thoughts = b.ids(ANSWER.partition("</think>")[0] + "</think>")
        assert final.usage.output_tokens_details.reasoning_tokens == len(thoughts)
        assert final.usage.input_tokens_details.cached_tokens == 2


async def test_whole_and_streamed_answers_are_the_same_but_for_ids_and_times(bench: MakeBench) -> None:
    async with bench(tool_format="hermes") as b, client(b) as sdk:
        b.decode.script = speaking([*b.ids(ANSWER), END])
        asked = {**ASKED, "tools": [TOOL, {"type": "web_search"}], "include": ["message.output_text.logprobs"]}
        whole = (await sdk.responses.create(**asked)).model_dump(mode="json")
        streamed = (await events_of(sdk, **asked))[-1].response.model_dump(mode="json")
        for each in (whole, streamed):
            each |= {"id": "", "created_at": 0, "completed_at": 0}
            each["output"] = [item | {"id": "", "call_id": ""} for item in each["output"]]
        logprobs = [each["output"][1]["content"][0].pop("logprobs") for each in (whole, streamed)]
        assert whole == streamed
        assert [tool["name"] for tool in whole["tools"]] == ["now"], "what the model was not shown is not named"
        assert logprobs[0] == logprobs[1]
        assert "".join(entry["token"] for entry in logprobs[0]) == "Hm."


async def test_logprobs_come_with_the_deltas_whose_tokens_they_are(bench: MakeBench) -> None:
    async with bench() as b, client(b) as sdk:
        b.decode.script = speaking([*b.ids("hello world </think"), END])
        events = await events_of(sdk, **ASKED, top_logprobs=2, include=["message.output_text.logprobs"])
        entries = [entry for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
        assert "".join(entry.token for entry in entries) == "hello world </think"
        assert all(len(entry.top_logprobs) == 2 for entry in entries)
        part = events[-1].response.output[0].content[0]
        assert [entry.token for entry in part.logprobs] == [entry.token for entry in entries]


async def test_the_sdks_accumulator_and_its_parser_take_it(bench: MakeBench) -> None:
    class Place(BaseModel):
        city: str

    async with bench(tool_format="hermes") as b, client(b) as sdk:
        b.decode.script = speaking([*b.ids('{"city": "Rome"}'), END])
        asked: Any = {**ASKED, "text_format": Place}
        parsed = await sdk.responses.parse(**asked)
        assert parsed.output_parsed == Place(city="Rome")
        schema = json.loads(b.decode.started[0].sampling.grammar.text)
        assert '"city"' in json.dumps(schema), "the schema is kept, not only hoped for"
        async with sdk.responses.stream(**asked) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_response()
        assert final.output_parsed == Place(city="Rome")
        b.decode.script = speaking([*b.ids(ANSWER), END])
        async with sdk.responses.stream(**ASKED, tools=[TOOL]) as stream:
            calls = [event async for event in stream if event.type == "response.function_call_arguments.done"]
        assert [call.arguments for call in calls] == ['{"zone": "utc"}', "{}"]


async def test_an_answer_goes_back_as_it_came(bench: MakeBench) -> None:
    """An agent's next request: its own items, the answer's, the results."""
    async with bench(tool_format="hermes") as b, client(b) as sdk:
        b.decode.script = speaking([*b.ids(ANSWER), END])
        user = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "time?"}]}
        first = await sdk.responses.create(model=MODEL_NAME, input=[user], tools=[TOOL])  # type: ignore[list-item]
        calls: Any = [item for item in first.output if item.type == "function_call"]
        results = [
            {"type": "function_call_output", "call_id": calls[0].call_id, "output": "noon"},
            {
                "type": "function_call_output",
                "call_id": calls[1].call_id,
                "output": [{"type": "input_text", "text": "one"}],
            },
        ]
        history: Any = [user, *(item.model_dump(exclude_none=True) for item in first.output), *results]
        await sdk.responses.create(model=MODEL_NAME, input=history, tools=[TOOL])
        prompt = prompt_of(b)
        assert prompt.count("<|im_start|>assistant") == 2, "thoughts, text and calls are one turn, then the next"
        assert "<|im_start|>assistant\nHm." in prompt
        assert '"zone": "utc"' in prompt
        assert "<|im_start|>tool\nnoon<|im_end|>\n<|im_start|>tool\none<|im_end|>" in prompt


async def test_functions_of_a_namespace_are_called_by_it(bench: MakeBench) -> None:
    clock: Any = {"type": "function", "name": "now", "parameters": {}, "strict": False}
    spaces: Any = [{"type": "namespace", "name": name, "description": "", "tools": [clock]} for name in ("sun", "atom")]
    async with bench(tool_format="hermes") as b, client(b) as sdk:
        b.decode.script = speaking([*b.ids(ANSWER.replace('"now"', '"atom__now"', 1)), END])
        asked = {**ASKED, "tools": [clock, *spaces]}
        events = await events_of(sdk, **asked)
        answer = events[-1].response
        calls = answer.output[2:]
        assert [(call.name, call.namespace) for call in calls] == [("now", "atom"), ("now", None)]
        added = [event.item for event in events if event.type == "response.output_item.added"][2:]
        assert [(item.name, item.namespace) for item in added] == [("now", "atom"), ("now", None)]
        assert [tool.model_dump(exclude_none=True)["name"] for tool in answer.tools] == ["now", "sun", "atom"]
        assert all(f'"name": "{name}"' in prompt_of(b) for name in ("now", "sun__now", "atom__now"))
        done = [{"type": "function_call_output", "call_id": call.call_id, "output": "noon"} for call in calls]
        again: Any = [{"role": "user", "content": "x"}, *(call.model_dump(exclude_none=True) for call in calls), *done]
        await sdk.responses.create(**{**asked, "input": again, "tools": spaces[1:]})
        assert prompt_of(b).count('"name": "atom__now"') == 2, "declared, and called before"


async def test_what_agents_send_with_every_request_is_taken(bench: MakeBench) -> None:
    async with bench(tool_format="hermes") as b, client(b) as sdk:
        b.decode.script = speaking([*b.ids("done"), END])
        developer = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandboxed."}]}
        reasoning = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "xyz"}
        user = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "list the files"}]}
        body = {
            "model": MODEL_NAME,
            "instructions": "You are an agent.",
            "input": [developer, user, reasoning],
            "tools": [TOOL, {"type": "web_search", "external_web_access": False}],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "thread-1",
            "text": {"verbosity": "low"},
            "service_tier": "auto",
            "client_metadata": {"x": "y"},
            "stream_options": {"include_obfuscation": False},
        }
        same_key = {"authorization": "Bearer none"}
        events = await events_of(sdk, **{k: v for k, v in body.items() if k != "client_metadata"})
        assert events[-1].type == "response.completed"
        assert events[-1].response.reasoning.effort == "medium"
        assert (await b.http.post("/v1/responses", json=body, headers=same_key)).status_code == 200
        assert prompt_of(b).startswith("<|im_start|>system\nYou are an agent.\n\nSandboxed.<|im_end|>\n")
        assert b.scheduler.routed[0].session, "prompt_cache_key is the session"
        assert b.scheduler.routed[0].session == b.scheduler.routed[1].session


@pytest.mark.parametrize(
    ("choice", "is_forced"),
    [
        ("required", True),
        ({"type": "function", "name": "now"}, True),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]}, True),
        ("auto", False),
    ],
)
async def test_tool_choice_is_understood(bench: MakeBench, choice: Any, is_forced: bool) -> None:
    async with bench(tool_format="hermes") as b, client(b) as sdk:
        answer = await sdk.responses.create(**ASKED, tools=[TOOL], tool_choice=choice)
        assert b.decode.started[0].sampling.HasField("grammar") == is_forced
        assert answer.model_dump(mode="json", exclude_none=True)["tool_choice"] == choice


async def test_an_answer_that_is_cut_off_is_incomplete(bench: MakeBench) -> None:
    async with bench() as b, client(b) as sdk:
        b.decode.script = speaking(b.ids("hello wor"), LENGTH)
        answer: Any = await sdk.responses.create(**ASKED, max_output_tokens=3)
        assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert answer.output[0].status == "incomplete"
        assert (await events_of(sdk, **ASKED, max_output_tokens=3))[-1].type == "response.incomplete"
        b.decode.script = speaking(ids := b.ids("<think>hello  \n"), LENGTH)
        answer = await sdk.responses.create(**ASKED, max_output_tokens=len(ids))
        assert answer.usage.output_tokens_details.reasoning_tokens == len(ids), "all of it is thoughts"


async def test_a_stream_that_fails_ends_with_response_failed(bench: MakeBench) -> None:
    async with bench(migration_timeout_seconds=0.2) as b, client(b) as sdk:

        async def script(start: Any) -> AsyncIterator[Any]:
            for delta in deltas(start, b.ids("hello"), None):
                yield delta
            b.scheduler.decoders = []
            b.decode.script = failing(13)
            async for delta in failing(13)(start):
                yield delta
            await forever()

        b.decode.script = script
        events = await events_of(sdk, **ASKED)
        assert events[-1].type == "response.failed"
        failed = events[-1].response
        assert (failed.status, failed.error.code) == ("failed", "server_error")
        assert (failed.output_text, failed.output[0].status) == ("hello", "incomplete")
        assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_input_tokens_are_counted_without_a_worker(bench: MakeBench) -> None:
    async with bench() as b, client(b) as sdk:
        counted = await sdk.responses.input_tokens.count(**ASKED, instructions="Be brief.")
        assert not b.decode.started
        await sdk.responses.create(**ASKED, instructions="Be brief.")
        assert counted.input_tokens == len(b.decode.started[0].token_ids)


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
