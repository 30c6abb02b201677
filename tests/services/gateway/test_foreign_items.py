"""Other servers' tools in /v1/responses requests: every tool and item type of OpenAI's SDK."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from openai import BadRequestError
from openai.types.responses.response_input_item_param import ResponseInputItemParam
from openai.types.responses.tool_param import ToolParam

from tests.services.gateway.conftest import MODEL_NAME, MakeBench
from tests.services.gateway.test_responses import ASKED, TOOL, client, prompt_of
from weft_services.gateway.dialects.chat_translation import UNREADABLE
from weft_services.gateway.dialects.responses_items import kept_items
from weft_services.gateway.dialects.responses_requests import PreviousResponse, parse_responses

Item = dict[str, Any]
USER: Item = {"type": "message", "role": "user", "content": "hi"}
SEARCH: Item = {"type": "function", "name": "find_files", "parameters": {"type": "object"}, "strict": False}

# kind: the items, and what the model sees of them: the calls with their arguments, the results
SHOWN: dict[str, tuple[list[Item], list[tuple[str, Any]], list[str]]] = {
    "function_call": (
        [
            {"type": "function_call", "call_id": "c", "name": "now", "arguments": '{"zone": "utc"}'},
            {"type": "function_call_output", "call_id": "c", "output": "noon"},
        ],
        [("now", {"zone": "utc"})],
        ["noon"],
    ),
    "custom_tool_call": (
        [
            {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "patch"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "ok"}]},
        ],
        [("apply_patch", {"input": "patch"})],
        ["ok"],
    ),
    "local_shell_call": (
        [
            {"type": "local_shell_call", "id": "l", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}},
            {"type": "local_shell_call_output", "id": "c", "output": "a.txt"},
        ],
        [("local_shell", {"type": "exec", "command": ["ls"]})],
        ["a.txt"],
    ),
    "shell_call": (
        [
            {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}},
            {
                "type": "shell_call_output",
                "call_id": "c",
                "output": [{"stdout": "a.txt", "stderr": "", "outcome": None}],
            },
        ],
        [("shell", {"commands": ["ls"]})],
        ['[{"stdout":"a.txt","stderr":"","outcome":null}]'],
    ),
    "apply_patch_call": (
        [
            {"type": "apply_patch_call", "call_id": "c", "operation": {"type": "delete_file", "path": "a"}},
            {"type": "apply_patch_call_output", "call_id": "c", "status": "completed"},
        ],
        [("apply_patch", {"type": "delete_file", "path": "a"})],
        ["completed"],
    ),
    "computer_call": (
        [
            {"type": "computer_call", "id": "i", "call_id": "c", "action": {"type": "screenshot"}},
            {
                "type": "computer_call_output",
                "call_id": "c",
                "output": {"type": "computer_screenshot", "image_url": "data:AAAA"},
            },
        ],
        [("computer", {"type": "screenshot"})],
        [UNREADABLE],
    ),
    "tool_search_call": (
        [
            {"type": "tool_search_call", "call_id": "c", "arguments": {"query": "x"}},
            {"type": "tool_search_output", "call_id": "c", "tools": []},
        ],
        [("tool_search", {"query": "x"})],
        ["[]"],
    ),
    "program": (
        [
            {"type": "program", "id": "p", "call_id": "c", "code": "1 + 1", "fingerprint": "f"},
            {"type": "program_output", "id": "o", "call_id": "c", "result": "2", "status": "completed"},
        ],
        [("program", {"code": "1 + 1"})],
        ["2"],
    ),
    "code_interpreter_call": (
        [
            {
                "type": "code_interpreter_call",
                "id": "i",
                "code": "print(1)",
                "outputs": [{"type": "logs", "logs": "1"}],
                "status": "completed",
                "container_id": "x",
            }
        ],
        [("code_interpreter", {"code": "print(1)"})],
        ['[{"type":"logs","logs":"1"}]'],
    ),
    "file_search_call": (
        [{"type": "file_search_call", "id": "i", "queries": ["x"], "results": [{"file_id": "f", "text": "found"}]}],
        [("file_search", {"queries": ["x"]})],
        ["found"],
    ),
    "mcp_call": (
        [{"type": "mcp_call", "id": "i", "server_label": "s", "name": "ask", "arguments": '{"q": 1}', "output": "yes"}],
        [("ask", {"q": 1})],
        ["yes"],
    ),
}
PASSED_OVER: list[Item] = [
    {"type": "additional_tools", "role": "developer", "tools": []},
    {"type": "compaction", "encrypted_content": "x"},
    {"type": "configuration_update", "reasoning": {"effort": "low"}},
    {"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": "AAAA"},
    {"type": "mcp_approval_request", "id": "a", "server_label": "s", "name": "ask", "arguments": "{}"},
    {"type": "mcp_approval_response", "approval_request_id": "a", "approve": True},
    {"type": "mcp_list_tools", "id": "l", "server_label": "s", "tools": []},
    {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
    # not finished, so that there is no result
    {"type": "mcp_call", "id": "i", "server_label": "s", "name": "ask", "arguments": "{}", "status": "in_progress"},
    {"type": "code_interpreter_call", "id": "i", "code": "1", "outputs": None, "container_id": "x", "status": "failed"},
    # of servers that OpenAI's SDK does not know
    {"type": "ghost_snapshot", "ghost_commit": {}},
]
REFUSED = {"item_reference", "compaction_trigger"}
TOOLS: list[Item] = [
    {"type": "file_search", "vector_store_ids": ["v"]},
    {"type": "computer"},
    {"type": "computer_use_preview", "display_height": 1, "display_width": 1, "environment": "browser"},
    {"type": "web_search"},
    {"type": "web_search_2025_08_26"},
    {"type": "web_search_preview"},
    {"type": "web_search_preview_2025_03_11"},
    {"type": "mcp", "server_label": "s", "server_url": "https://example.com"},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "programmatic_tool_calling"},
    {"type": "image_generation"},
    {"type": "local_shell"},
    {"type": "shell"},
    {"type": "tool_search", "execution": "client", "description": "d", "parameters": {"type": "object"}},
    {"type": "apply_patch"},
    {"type": "openrouter:web_search"},
]
CUSTOM: Item = {"type": "custom", "name": "js"}
SPACE: Item = {"type": "namespace", "name": "mcp", "description": "d", "tools": [CUSTOM]}


def kinds_of(union: Any) -> set[str]:
    """Of the SDK's union of items or tools, which may be made of unions."""
    kinds: set[str] = set()
    for member in get_args(union):
        if fields := getattr(member, "model_fields", None):
            kinds |= {*_literals(fields["type"].annotation)}
        else:
            kinds |= {*_literals(get_type_hints(member).get("type"))} if isinstance(member, type) else kinds_of(member)
    return kinds


def _literals(hint: Any) -> Iterator[str]:
    if get_origin(hint) is Literal:
        yield from get_args(hint)
    else:
        for each in get_args(hint):
            yield from _literals(each)


def messages_of(items: list[Item], **fields: Any) -> list[Item]:
    body = json.dumps({"model": "m", "input": [USER, *items, USER], **fields}).encode()
    return list(parse_responses(body, PreviousResponse()).prompts[0].messages)  # type: ignore[union-attr]


def test_every_kind_of_item_of_the_sdk_is_tried() -> None:
    tried = {item["type"] for items, _, _ in SHOWN.values() for item in items}
    tried |= {item["type"] for item in PASSED_OVER} | REFUSED | {"message"}
    assert kinds_of(ResponseInputItemParam) <= tried


def test_every_kind_of_tool_of_the_sdk_is_tried() -> None:
    assert kinds_of(ToolParam) <= {tool["type"] for tool in [*TOOLS, TOOL, CUSTOM, SPACE]}


@pytest.mark.parametrize("kind", SHOWN)
def test_calls_and_results_of_other_servers_are_shown(kind: str) -> None:
    items, calls, results = SHOWN[kind]
    _, called, *answers, _ = messages_of(items)
    functions = [call["function"] for call in called["tool_calls"]]
    assert [(each["name"], each["arguments"]) for each in functions] == calls
    assert [(each["role"], each["content"]) for each in answers] == [("tool", text) for text in results]
    assert {each["tool_call_id"] for each in answers} == {call["id"] for call in called["tool_calls"]}


@pytest.mark.parametrize("kind", SHOWN)
def test_calls_of_other_servers_are_kept_as_they_are_shown(kind: str) -> None:
    items = SHOWN[kind][0]
    kept = kept_items([USER, *items, USER])
    assert messages_of(kept[1:-1]) == messages_of(items)
    assert all(item["id"] for item in kept)


@pytest.mark.parametrize("item", PASSED_OVER, ids=lambda item: item["type"])
def test_items_without_text_are_passed_over(item: Item) -> None:
    assert messages_of([item]) == messages_of([])


async def test_tools_of_the_other_side_are_left_out(bench: MakeBench) -> None:
    async with bench(tool_format="hermes", context=4096) as b, client(b) as sdk:

        async def ask(*tools: Item, **fields: Any) -> Any:
            return await sdk.responses.create(**{**ASKED, "tools": tools, **fields})

        await ask(TOOL)
        answer = await ask(*TOOLS, TOOL)
        assert prompt_of(b) == prompt_of(b, 0)
        assert [tool.type for tool in answer.tools] == ["function"]
        for tool in TOOLS:
            shown = (await ask(tool, {**SPACE, "tools": [TOOL, tool]}, tool_choice="auto")).tools
            assert [each.name for each in shown[0].tools] == ["now"]
            with pytest.raises(BadRequestError, match=tool["type"]) as refused:
                await ask(tool, TOOL, tool_choice={"type": tool["type"]})
            assert refused.value.param == "tool_choice"
            with pytest.raises(BadRequestError, match=tool["type"]):
                await ask(tool, tool_choice="required")


async def test_tools_found_later_may_be_called(bench: MakeBench) -> None:
    found = [SEARCH, {**SPACE, "tools": [TOOL]}, TOOL]
    items = [USER, *SHOWN["tool_search_call"][0][:1], {"type": "tool_search_output", "call_id": "c", "tools": found}]
    more = {"type": "additional_tools", "role": "developer", "tools": [SEARCH, {**SEARCH, "name": "grep"}]}
    async with bench(tool_format="hermes", context=4096) as b, client(b) as sdk:
        asked: Any = {"model": MODEL_NAME, "input": [*items, more], "tools": [TOOL]}
        choice: Any = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "grep"}]}
        answer: Any = await sdk.responses.create(**asked, tool_choice=choice)
        assert [tool.name for tool in answer.tools] == ["now", "find_files", "mcp", "grep"]
        assert '"name": "mcp__now"' in prompt_of(b)
        more["tools"] = [{"type": "function"}]
        with pytest.raises(BadRequestError) as refused:
            await sdk.responses.create(**asked)
        assert refused.value.param == "input.3.tools.0"


def test_reference_to_an_earlier_item_is_that_item() -> None:
    said = {"type": "message", "role": "user", "id": "msg_1", "content": "one"}
    fields = {"model": "m", "previous_response_id": "resp_1"}
    for reference in ({"type": "item_reference", "id": "msg_1"}, {"id": "msg_1"}):
        body = json.dumps({**fields, "input": [reference, USER]}).encode()
        asked = parse_responses(body, PreviousResponse("resp_1", (said,)))
        assert [each["content"] for each in asked.prompts[0].messages] == ["one", "hi"]  # type: ignore[union-attr]
        assert [item["id"] for item in asked.kept_items or ()][:1] == ["msg_1"]
        assert len(asked.kept_items or ()) == 2
