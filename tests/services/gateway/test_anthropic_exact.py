"""/v1/messages: nothing of what the model or the client wrote is changed or lost on the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from tests.services.gateway.conftest import END, MODEL_NAME, MakeBench, tiny_tokenizer, write_model
from tests.services.gateway.fakes import speaking
from tests.services.gateway.test_anthropic import TOOLS, USER, client
from weft_services.gateway.dialects.anthropic_requests import parse_messages
from weft_services.gateway.generation import Conversation


async def test_arguments_stay_as_they_were_written(bench: MakeBench) -> None:
    async with bench(tool_format="hermes", context=4096) as b:
        arguments = '{"id": 123456789012345678901234567890, "deep": ' + "[" * 300 + "]" * 300 + "}"
        call = f'<tool_call>{{"name": "now", "arguments": {arguments}}}</tool_call>'
        b.decode.script = speaking([*b.ids(call), END])
        asked = {"model": MODEL_NAME, "max_tokens": 999, "messages": [USER], "tools": TOOLS}
        answer = await b.http.post("/v1/messages", json=asked)
        assert answer.status_code == 200
        assert json.loads(answer.text)["content"][0]["input"] == json.loads(arguments)


async def test_a_call_that_is_sent_back_is_shown_as_it_was_written(bench: MakeBench) -> None:
    async with bench(tool_format="hermes", context=4096) as b:
        used = {
            "type": "tool_use",
            "id": "a",
            "name": "now",
            "input": {"wei": 25_000_000_000_000_000_001, "rate": 1e-7},
        }
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "done"}]}
        messages = [USER, {"role": "assistant", "content": [used]}, result]
        body = {"model": MODEL_NAME, "max_tokens": 9, "messages": messages, "tools": TOOLS}
        assert (await b.http.post("/v1/messages", json=body)).status_code == 200
        shown = b.tokenizer.decode(list(b.decode.started[0].token_ids), skip_special_tokens=False)
        assert '{"wei": 25000000000000000001, "rate": 1e-07}' in shown


def conversation(turns: list[list[Any]]) -> Conversation:
    """What becomes of the contents of a user's messages, an assistant's, and a user's again."""
    roles = ("user", "assistant", "user")
    messages = [{"role": role, "content": each} for role, turn in zip(roles, turns, strict=True) for each in turn]
    (prompt,) = parse_messages(json.dumps({"model": "m", "max_tokens": 1, "messages": messages}).encode()).prompts
    assert isinstance(prompt, Conversation)
    return prompt


def test_messages_of_one_role_in_a_row_are_one_turn() -> None:
    """As Anthropic's document has it; many a template refuses them otherwise."""
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    used = {"type": "tool_use", "id": "a", "name": "now", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "noon"}
    apart = conversation([["a", [text("b")]], [[text("c")], [thought], "d", [used]], [[result], "e", "", "f"]])
    joined = conversation([["a\n\nb"], [[thought, text("c\n\nd"), used]], [[result, text("e\n\nf")]]])
    assert apart == joined
    assert [message["role"] for message in apart.messages] == ["user", "assistant", "tool", "user"]


def text(said: str) -> dict[str, str]:
    """A block of it."""
    return {"type": "text", "text": said}


async def test_thoughts_in_a_stream_are_signed_as_whole_ones_are(bench: MakeBench, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in ("<think>", "</think>")])
    template = "{% for m in messages %}<think>{{ m.reasoning_content }}</think>{{ m.content }}\n{% endfor %}answer: "
    async with bench(model=str(write_model(tmp_path, tokenizer, template))) as b, client(b) as sdk:
        b.decode.script = speaking([*tokenizer.encode("<think>hello</think>world").ids, END])
        asked: Any = {"model": MODEL_NAME, "max_tokens": 99, "messages": [USER]}
        whole = await sdk.messages.create(**asked)
        async with sdk.messages.stream(**asked) as stream:
            deltas = [event.delta.type async for event in stream if event.type == "content_block_delta"]
            streamed = await stream.get_final_message()
        assert [block.type for block in whole.content] == ["thinking", "text"]
        assert streamed.content[0] == whole.content[0]
        thought = len(tokenizer.encode("<think>hello</think>").ids)
        for usage in (whole.usage, streamed.usage):
            assert usage.output_tokens_details is not None
            assert usage.output_tokens_details.thinking_tokens == thought
        assert list(dict.fromkeys(deltas)) == ["thinking_delta", "signature_delta", "text_delta"]


async def test_what_other_servers_clients_add_reaches_the_engine(bench: MakeBench) -> None:
    async with bench() as b, client(b) as sdk:
        b.decode.script = speaking([*b.ids("hello"), END])
        added = {"seed": 7, "min_p": 0.25, "priority": -3, "reject_if_busy": True}
        asked: Any = {"model": MODEL_NAME, "max_tokens": 9, "messages": [USER], "extra_body": added}
        await sdk.messages.create(**asked)
        start = b.decode.started[0]
        assert (start.sampling.seed, start.sampling.min_p, start.priority) == (7, 0.25, 3)


async def test_a_model_sees_the_tools_that_it_sees_in_chats(bench: MakeBench) -> None:
    async with bench(context=4096) as b:
        tool: Any = {"name": "now", "description": "time", "input_schema": {"type": "object", "properties": {}}}
        function = {"name": "now", "description": "time", "parameters": tool["input_schema"]}
        asked: Any = {"model": MODEL_NAME, "max_tokens": 9, "messages": [USER]}
        await b.http.post("/v1/messages", json={**asked, "tools": [tool]})
        tools = [{"type": "function", "function": function}]
        await b.http.post("/v1/chat/completions", json={**asked, "tools": tools})
        by_messages, by_chat = b.decode.started
        assert by_messages.token_ids == by_chat.token_ids


async def test_there_may_be_many_tools_unless_they_become_a_grammar(bench: MakeBench) -> None:
    async with bench(tool_format="hermes", context=65_536) as b:
        b.decode.script = speaking([*b.ids("hello"), END])
        many = [{"name": f"f{number}", "input_schema": {"type": "object"}} for number in range(300)]
        asked: Any = {"model": MODEL_NAME, "max_tokens": 9, "messages": [USER], "tools": many}
        assert (await b.http.post("/v1/messages", json=asked)).status_code == 200
        forced = await b.http.post("/v1/messages", json={**asked, "tool_choice": {"type": "any"}})
        assert (forced.status_code, forced.json()["error"]["message"][:10]) == (400, "tools: 300")
