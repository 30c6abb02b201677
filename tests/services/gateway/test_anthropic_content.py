"""/v1/messages: content reaches the model and the client unchanged, also blocks and tools of Anthropic's own."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic import BadRequestError
from anthropic.types.beta.beta_content_block_param import BetaContentBlockParam
from anthropic.types.beta.beta_tool_union_param import BetaToolUnionParam
from anthropic.types.content_block_param import ContentBlockParam
from anthropic.types.tool_union_param import ToolUnionParam
from tokenizers import AddedToken

from tests.services.gateway.conftest import CONTEXT, END, MODEL_NAME, MakeBench, tiny_tokenizer, write_model
from tests.services.gateway.fakes import speaking
from tests.services.gateway.test_anthropic import TOOLS, USER, client
from tests.services.gateway.test_foreign_items import kinds_of
from tests.services.gateway.test_responses import prompt_of
from weft.errors import InvalidRequest
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


# by these Claude Code sums a conversation up, and asks again for fewer tokens
TOO_LONG = re.compile(r"prompt is too long: (\d+) tokens > (\d+) maximum")
TOO_MUCH = re.compile(r"input length and `max_tokens` exceed context limit: (\d+) \+ (\d+) > (\d+)")


async def message_of(sdk: anthropic.AsyncAnthropic, **fields: Any) -> str:
    """Of the refusal."""
    with pytest.raises(anthropic.BadRequestError) as refusal:
        await sdk.messages.create(**{"model": MODEL_NAME, "max_tokens": 9, "messages": [USER], **fields})
    body: Any = refusal.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    return str(body["error"]["message"])


async def test_what_does_not_fit_is_told_in_anthropics_words(bench: MakeBench) -> None:
    async with bench() as b, client(b) as sdk:
        long: Any = [{"role": "user", "content": "a b " * 300}]
        counted = (await sdk.messages.count_tokens(model=MODEL_NAME, messages=long)).input_tokens
        found = TOO_LONG.search(await message_of(sdk, messages=long))
        assert found is not None
        assert (int(found[1]), int(found[2])) == (counted, CONTEXT - 1)
        counted = (await sdk.messages.count_tokens(model=MODEL_NAME, messages=[USER])).input_tokens
        found = TOO_MUCH.search(await message_of(sdk, max_tokens=9000))
        assert found is not None
        assert tuple(map(int, found.groups())) == (counted, 9000, CONTEXT)
        # and what is left fits
        await sdk.messages.create(model=MODEL_NAME, max_tokens=CONTEXT - counted, messages=[USER])


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("POST", "/v1/messages/batches", 404, "not_found_error"),
        ("GET", "/v1/messages", 405, "invalid_request_error"),
    ],
)
async def test_routes_that_are_not_there_are_told_in_anthropics_words(
    bench: MakeBench, method: str, path: str, status: int, kind: str
) -> None:
    async with bench() as b:
        answer = await b.http.request(method, path, json={})
        told = answer.json()
        assert (answer.status_code, told["type"], told["error"]["type"]) == (status, "error", kind)
        assert answer.headers["request-id"]


async def test_a_turn_of_thoughts_alone_stays_a_turn(bench: MakeBench) -> None:
    async with bench() as b:
        thought = {"type": "thinking", "thinking": "hm", "signature": ""}
        messages = [USER, {"role": "assistant", "content": [thought]}, USER]
        body = {"model": MODEL_NAME, "max_tokens": 9, "messages": messages}
        assert (await b.http.post("/v1/messages", json=body)).status_code == 200
        chat = [USER, {"role": "assistant", "content": None, "reasoning_content": "hm"}, USER]
        body = {"model": MODEL_NAME, "messages": chat}
        assert (await b.http.post("/v1/chat/completions", json=body)).status_code == 200
        prompts = {b.tokenizer.decode(list(each.token_ids), skip_special_tokens=False) for each in b.decode.started}
        assert [prompt.count("<|im_start|>assistant") for prompt in prompts] == [2]


async def test_what_an_assistant_refused_is_what_it_said(bench: MakeBench) -> None:
    async with bench() as b:
        chat = [USER, {"role": "assistant", "content": None, "refusal": "I will not."}, USER]
        assert (
            await b.http.post("/v1/chat/completions", json={"model": MODEL_NAME, "messages": chat})
        ).status_code == 200
        assert "I will not." in b.tokenizer.decode(list(b.decode.started[0].token_ids))


Block = dict[str, Any]
ASKED: Block = {"role": "user", "content": "asked"}
RESULTS: dict[str, tuple[Any, str]] = {
    "web_search_tool_result": (
        [{"type": "web_search_result", "title": "t", "url": "u", "encrypted_content": "x" * 99, "page_age": None}],
        '[{"type":"web_search_result","title":"t","url":"u","page_age":null}]',
    ),
    "web_fetch_tool_result": ({"type": "web_fetch_tool_result_error", "error_code": "gone"}, "gone"),
    "advisor_tool_result": ({"type": "advisor_result", "text": "advice"}, "advice"),
    "code_execution_tool_result": ({"type": "code_execution_result", "stdout": "42", "content": []}, '"stdout":"42"'),
    "bash_code_execution_tool_result": ({"type": "bash_code_execution_result", "stdout": "42", "content": []}, "42"),
    "text_editor_code_execution_tool_result": (
        {"type": "text_editor_code_execution_view_result", "content": "a line", "file_type": "text"},
        "a line",
    ),
    "tool_search_tool_result": (
        {"type": "tool_search_tool_search_result", "tool_references": [{"type": "tool_reference", "tool_name": "now"}]},
        "now",
    ),
    "mcp_tool_result": ([{"type": "text", "text": "from afar"}], "from afar"),
}
TEXTS: dict[str, tuple[Block, str]] = {
    "text": ({"type": "text", "text": "plain"}, "plain"),
    "compaction": ({"type": "compaction", "content": "a summary"}, "a summary"),
    "search_result": (
        {"type": "search_result", "source": "u", "title": "t", "content": [{"type": "text", "text": "found"}]},
        "t\nu\nfound",
    ),
    "document": (
        {"type": "document", "title": "t", "source": {"type": "text", "media_type": "text/plain", "data": "page"}},
        "t\npage",
    ),
}
SILENT: list[Block] = [
    {"type": "container_upload", "file_id": "f"},
    {"type": "fallback", "from": {"model": "a"}, "to": {"model": "b"}},
    {"type": "mcp_tool_listing", "mcp_server_name": "s", "tools": []},
    {"type": "tool_addition", "tool": {"type": "tool_reference", "tool_name": "now"}},
    {"type": "tool_removal", "tool": {"type": "tool_reference", "tool_name": "now"}},
    {"type": "redacted_thinking", "data": "x"},
    {"type": "compaction", "content": None},
]
# shown by other tests, or nothing that a model without eyes could read
OTHERS = {"thinking", "tool_use", "tool_result", "server_tool_use", "mcp_tool_use", "image"}
SERVER_TOOLS = sorted((kinds_of(BetaToolUnionParam) | kinds_of(ToolUnionParam)) - {"custom"})


def messages_of(*messages: Block, **fields: Any) -> list[Block]:
    body = {"model": "m", "max_tokens": 9, "messages": list(messages), **fields}
    (prompt,) = parse_messages(json.dumps(body).encode()).prompts
    assert isinstance(prompt, Conversation)
    return list(prompt.messages)


def test_every_kind_of_block_of_the_sdk_is_tried() -> None:
    tried = RESULTS.keys() | TEXTS.keys() | {block["type"] for block in SILENT} | OTHERS
    assert kinds_of(BetaContentBlockParam) | kinds_of(ContentBlockParam) <= tried


@pytest.mark.parametrize("kind", RESULTS)
def test_server_tools_are_shown_as_calls_and_results(kind: str) -> None:
    content, shown = RESULTS[kind]
    use = "mcp_tool_use" if kind.startswith("mcp") else "server_tool_use"
    blocks = [
        {"type": "text", "text": "I look."},
        {"type": use, "id": "srvtoolu_1", "name": "look", "input": {"q": "x"}},
        {"type": kind, "tool_use_id": "srvtoolu_1", "content": content},
        {"type": "text", "text": "I found it."},
    ]
    _, called, answer, said, _ = messages_of(ASKED, {"role": "assistant", "content": blocks}, ASKED)
    assert (called["content"], called["tool_calls"][0]["function"]["name"]) == ("I look.", "look")
    assert (answer["role"], answer["tool_call_id"]) == ("tool", called["tool_calls"][0]["id"])
    assert shown in answer["content"]
    assert "xxx" not in answer["content"], "what only Anthropic can read is left out"
    assert (said["role"], said["content"]) == ("assistant", "I found it.")


@pytest.mark.parametrize("kind", TEXTS)
def test_blocks_with_text_are_read(kind: str) -> None:
    block, text = TEXTS[kind]
    assert messages_of({"role": "user", "content": [block]}) == [{"role": "user", "content": text}]
    if kind != "compaction":
        result = {"type": "tool_result", "tool_use_id": "a", "content": [block]}
        assert messages_of(ASKED, {"role": "user", "content": [result]})[1]["content"] == text


@pytest.mark.parametrize("block", SILENT, ids=lambda block: block["type"])
def test_blocks_without_text_are_passed_over(block: Block) -> None:
    said = {"type": "text", "text": "said"}
    with_it = messages_of(ASKED, {"role": "assistant", "content": [block, said]}, ASKED)
    assert [each["content"] for each in with_it] == ["asked", "said", "asked"]


@pytest.mark.parametrize(
    "block",
    [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
        {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}},
        {"type": "video"},
        {"text": "no type"},
    ],
)
def test_blocks_that_cannot_be_read_are_named(block: Block) -> None:
    with pytest.raises(InvalidRequest) as refused:
        messages_of(ASKED, {"role": "user", "content": [{"type": "text", "text": "look"}, block]})
    assert refused.value.param == "messages.1.content.1"
    assert "messages.1.content.1" in str(refused.value)


async def test_tools_of_anthropics_are_left_out(bench: MakeBench) -> None:
    async with bench(tool_format="hermes", context=4096) as b, client(b) as sdk:

        async def ask(*tools: Block, **choice: Any) -> None:
            asked: Any = {"model": MODEL_NAME, "max_tokens": 9, "messages": [ASKED], "tools": tools}
            await sdk.messages.create(**(asked | ({"tool_choice": choice} if choice else {})))

        await ask(*TOOLS)
        for kind in SERVER_TOOLS:
            tool = {"type": kind, "name": f"the_{kind}"}
            await ask(tool, *TOOLS, type="auto")
            assert prompt_of(b) == prompt_of(b, 0)
        await ask(tool, type="auto")
        with pytest.raises(BadRequestError, match=tool["name"]):
            await ask(tool, type="any")
        with pytest.raises(BadRequestError, match=tool["name"]):
            await ask(tool, *TOOLS, type="tool", name=tool["name"])
        with pytest.raises(BadRequestError, match=r"tools\.1\.input_schema"):
            await ask(tool, {**TOOLS[0], "input_schema": [5]})
