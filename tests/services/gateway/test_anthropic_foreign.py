"""Tools and content blocks of /v1/messages that are Anthropic's own: every kind that its SDK has."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic import BadRequestError
from anthropic.types.beta.beta_content_block_param import BetaContentBlockParam
from anthropic.types.beta.beta_tool_union_param import BetaToolUnionParam
from anthropic.types.content_block_param import ContentBlockParam
from anthropic.types.tool_union_param import ToolUnionParam

from tests.services.gateway.conftest import MODEL_NAME, MakeBench
from tests.services.gateway.test_anthropic import TOOLS, client
from tests.services.gateway.test_foreign_items import kinds_of
from tests.services.gateway.test_responses import prompt_of
from weft.errors import InvalidRequest
from weft_services.gateway.dialects.anthropic_requests import parse_messages
from weft_services.gateway.generation import Conversation

Block = dict[str, Any]
USER: Block = {"role": "user", "content": "asked"}
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
    _, called, answer, said, _ = messages_of(USER, {"role": "assistant", "content": blocks}, USER)
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
        assert messages_of(USER, {"role": "user", "content": [result]})[1]["content"] == text


@pytest.mark.parametrize("block", SILENT, ids=lambda block: block["type"])
def test_blocks_without_text_are_passed_over(block: Block) -> None:
    said = {"type": "text", "text": "said"}
    with_it = messages_of(USER, {"role": "assistant", "content": [block, said]}, USER)
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
        messages_of(USER, {"role": "user", "content": [{"type": "text", "text": "look"}, block]})
    assert refused.value.param == "messages.1.content.1"
    assert "messages.1.content.1" in str(refused.value)


async def test_tools_of_anthropics_are_left_out(bench: MakeBench) -> None:
    async with bench(tool_format="hermes", context=4096) as b, client(b) as sdk:

        async def ask(*tools: Block, **choice: Any) -> None:
            asked: Any = {"model": MODEL_NAME, "max_tokens": 9, "messages": [USER], "tools": tools}
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
