"""What models write that is nearly a tool call: nothing of it is lost, and none of it ends an answer with an error."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.services.gateway.conftest import END, MODEL_NAME, MakeBench
from tests.services.gateway.fakes import speaking
from tests.services.gateway.test_tool_parsers import SEEK_V31, calls, cuts, read, said
from weft_services.gateway.text.parts import PartKind
from weft_services.gateway.text.tool_formats import FORMATS

NOT_JSON = ["{1, 2}", 'b"x"', "1j", "...", "1e999", "{[]: 1}", "{(1, 2): 3}"]
ADD = '{"name": "add", "arguments": {"a": 1}}'


@pytest.mark.parametrize(
    ("name", "written", "text", "expected"),
    [
        *(("llama", f"[add(a={value})]", f"[add(a={value})]", []) for value in NOT_JSON),
        ("llama", f"<|python_start|>{ADD}<|python_end|>", "", [("add", '{"a": 1}')]),
        ("mistral", f"[TOOL_CALLS]{ADD}", "", [("add", '{"a": 1}')]),
        ("mistral", '[TOOL_CALLS]{"city": "Rome"}', '[TOOL_CALLS]{"city": "Rome"}', []),
        ("mistral-args", '[TOOL_CALLS][ARGS]{"a": 1}', '[TOOL_CALLS][ARGS]{"a": 1}', []),
        ("kimi", "<|tool_call_begin|>{}", "<|tool_call_begin|>{}", []),
        ("deepseek-v3.1", SEEK_V31.format("", "{}"), "{}", []),
        ("hermes", f'<tool_call>{ADD[:-1]}, "parameters": {{"b": 2}}}}</tool_call>', "", [("add", '{"a": 1}')]),
    ],
)
def test_what_is_no_call_is_text_however_it_is_cut(
    name: str, written: str, text: str, expected: list[tuple[str, str]]
) -> None:
    for pieces in cuts(written):
        parts = read(FORMATS[name], pieces)
        assert (said(parts, PartKind.TEXT), calls(parts)) == (text, expected)
        assert all(part.text for part in parts)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_python_value_that_json_has_not_does_not_cost_the_answer(bench: MakeBench, stream: bool) -> None:
    written = "[add(a={1, 2})]"
    tools: Any = [{"type": "function", "function": {"name": "add"}}]
    async with bench(tool_format="llama") as b:
        b.decode.script = speaking([*b.ids(written), END])
        body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "x"}], "tools": tools, "stream": stream}
        answer = await b.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200
        assert '"error"' not in answer.text
        if not stream:
            assert json.loads(answer.text)["choices"][0]["message"]["content"] == written
