"""What models write that is nearly a tool call: nothing of it is lost, and none of it ends an answer with an error."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.services.gateway.conftest import END, MODEL_NAME, MakeBench
from tests.services.gateway.fakes import speaking
from tests.services.gateway.test_tool_parsers import SEEK_V31, calls, cuts, read, said
from weft_services.gateway.text.assistant import AnswerReader
from weft_services.gateway.text.parts import Part, PartKind, Parts, new_call_id
from weft_services.gateway.text.tool_formats import FORMATS

NOT_JSON = ["{1, 2}", 'b"x"', "1j", "...", "1e999", "{[]: 1}", "{(1, 2): 3}", "'\\ud83d'"]
HALF = '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>'
ADD = '{"name": "add", "arguments": {"a": 1}}'
SEEK_NONE = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_time<｜tool▁call▁end｜>"
XML = "<tool_call>\n<function=add>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"


PIECES = [
    *(marker for each in FORMATS.values() for marker in each.markers),
    *("<function=", "<function=add>", "<parameter=", "<parameter=a>", "</parameter>", "\n</parameter>", "</function>"),
    *("<think>", "</think>", "[add(", "[add(a=1)]", "functions.add:0", "```json", "```", "add", "NaN", "null", "1"),
    *('"name"', '"arguments"', '"parameters"', '"id"', '"add"', "{", "}", "[", "]", "(", ")", ":", ",", ";", '"', "\\"),
    *(
        ADD,
        ADD[:-2],
        '{"arguments": {}, "name": "add"}',
        '{"name": "no", "arguments": {}}',
        "ud83d",
        "🙂",
        "<",
        " ",
        "\n",
    ),
    " " * 700,
]


def joined(parts: list[Part]) -> list[tuple[str, int, str]]:
    """What of one kind follows upon itself, in one; ids are made up."""
    out: list[tuple[str, int, str]] = []
    for part in parts:
        kind, text = part.kind.name, part.text
        if out and out[-1][:2] == (kind, part.call) and part.kind is not PartKind.CALL:
            text = out.pop()[2] + text
        out.append((kind, part.call, text))
    return out


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
        ("deepseek-v3.1", f"{SEEK_NONE}{SEEK_V31.format('add', '{}')}", "get_time", [("add", "{}")]),
        ("hermes", HALF, HALF, []),
        ("hermes", f"{HALF} So?", f"{HALF} So?", []),
        ("hermes", f"<tool_call>[1]</tool_call>{HALF}", f"<tool_call>[1]</tool_call>{HALF}", []),
        ("hermes", 2 * f'<tool_call>{{"id": null, {ADD[1:]}</tool_call>', "", 2 * [("add", '{"a": 1}')]),
        ("hermes", 2 * '<tool_call>{"name": "add", "id": null}</tool_call>', "", 2 * [("add", "{}")]),
        ("qwen-xml", "<function=add><parameter=a>NaN</parameter></function>", "", [("add", '{"a": "NaN"}')]),
        ("qwen-xml", XML.format("{'b': [True, None]}"), "", [("add", '{"a": {"b": [true, null]}}')]),
        ("qwen-xml", XML.format("{'b': {1, 2}}"), "", [("add", """{"a": "{'b': {1, 2}}"}""")]),
        ("qwen-xml", XML.format("True"), "", [("add", '{"a": true}')]),
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


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
def test_whatever_is_written_is_read_the_same_however_it_is_cut(name: str, data: st.DataObject) -> None:
    pieces = st.sampled_from([*PIECES, *FORMATS[name].markers * 8])
    written = "".join(data.draw(st.lists(pieces, max_size=16)))
    thinks, is_thinking = data.draw(st.sampled_from([(False, False), (True, False), (True, True)]))
    is_cut = data.draw(st.booleans())
    whole, *others = [joined(read(FORMATS[name], each, thinks, is_thinking, is_cut)) for each in cuts(written)]
    assert all(other == whole for other in others)
    open_call = max((call for kind, call, _ in whole if kind == "CALL"), default=0) if is_cut else None
    for kind, call, text in whole:
        if kind == "ARGUMENTS" and call != open_call:
            assert isinstance(json.loads(text), dict)
    json.dumps(whole, ensure_ascii=False).encode()


@pytest.mark.parametrize("kind", [5, True, 0.5, {"type": "string"}, []])
def test_a_schema_that_is_none_does_not_cost_the_answer(kind: Any) -> None:
    parser = FORMATS["qwen-xml"].parser({"add": {"properties": {"a": {"type": kind}}}})
    reader = AnswerReader(parser, Parts(new_call_id), thinks=False)
    parts = reader.push("<function=add><parameter=a>1</parameter></function>") + reader.finish()
    assert calls(parts) == [("add", '{"a": 1}')]


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
