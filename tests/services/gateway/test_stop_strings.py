"""Stop strings end an answer where they stand in its text; thoughts and tool calls are not searched."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.services.gateway.conftest import END, MODEL_NAME, MakeBench
from tests.services.gateway.fakes import speaking
from tests.services.gateway.test_tool_parsers import calls, cuts, said
from tests.services.gateway.tool_answers import SCHEMAS
from weft_services.gateway.text.assistant import AnswerReader, StopScanner, VisibleStops
from weft_services.gateway.text.parts import Part, PartKind, Parts, overlap
from weft_services.gateway.text.tool_formats import FORMATS

USER: Any = {"role": "user", "content": "x"}
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": {"b": "x\n\ny STOP"}}}\n</tool_call>'


def reader(name: str, thinks: bool) -> AnswerReader:
    form = FORMATS[name]
    return AnswerReader(form.parser(SCHEMAS), Parts(form.new_id), thinks, call_openings=form.call_openings)


def read(pieces: list[str], stops: list[str], name: str = "hermes", thinks: bool = True) -> tuple[list[Part], Any]:
    """What the answer's own reader makes of what is given out."""
    scanner = VisibleStops(stops, ("<think>", "</think>", *FORMATS[name].markers), reader(name, thinks))
    own, parts = reader(name, thinks), list[Part]()
    for piece in pieces:
        text, stop = scanner.push(piece)
        parts += own.push(text)
        if stop is not None:
            return parts + own.finish(), stop
    text, stop = scanner.finish(is_cut=False)
    return parts + own.push(text) + own.finish(), stop


@pytest.mark.parametrize(
    ("written", "stops", "thoughts", "text", "num_calls", "stop"),
    [
        ("<think>a\n\nb STOP</think>\n\nYes. STOP no", ["STOP"], "a\n\nb STOP", "Yes. ", 0, "STOP"),
        ("<think>a\n\nb</think>\n\nYes.\n\nNo", ["\n\n"], "a\n\nb", "Yes.", 0, "\n\n"),
        (f"<think>Look. STOP\n\n{CALL}", ["STOP", "}"], "Look. STOP", "", 1, None),
        (f"<think>Look.\n{CALL} or</think>so STOP", ["STOP", "}"], f"Look.\n{CALL} or", "so ", 0, "STOP"),
        (f"Look.\n\n{CALL}", ["\n\n", "}", "STOP", '"'], "", "Look.", 1, None),
        (f"{CALL}\n{CALL}", ["}", "\n", "<", ":"], "", "", 2, None),
        (f"{CALL} So STOP it", ["STOP"], "", " So", 1, "STOP"),
        ("Look. STOP " + CALL, ["STOP"], "", "Look. ", 0, "STOP"),
        (f"a{CALL}b", ["ab"], "", "ab", 1, None),
        ("STOP it", ["STOP"], "", "", 0, "STOP"),
        ("a <tool_call>no STOP", ["STOP"], "", "a <tool_call>no ", 0, "STOP"),
        ("a <tool_call>no", ["l>n"], "", "a <tool_cal", 0, "l>n"),
        ("a < b", ["b"], "", "a < ", 0, "b"),
        ("a <?", ["?"], "", "a <", 0, "?"),
        ("a\n\n", ["\n\n"], "", "a", 0, "\n\n"),
        ("a STO", ["STOP"], "", "a STO", 0, None),
        ("one STOP", ["ST", " STOP", "one STOP!"], "", "one ", 0, "ST"),
        ("abcd", ["bcd", "abcd", "cd"], "", "", 0, "abcd"),
        ("naïve 🙂 日本語", ["日本"], "", "naïve 🙂 ", 0, "日本"),
        ("<think>a b</think>c", ["</think>"], "a b", "", 0, "</think>"),
        (f"{CALL}{CALL}", ["</tool_call>"], "", "", 1, "</tool_call>"),
    ],
)
def test_stop_strings_end_the_text_alone(
    written: str, stops: list[str], thoughts: str, text: str, num_calls: int, stop: str | None
) -> None:
    for pieces in cuts(written):
        parts, found = read(pieces, stops)
        assert (said(parts, PartKind.REASONING), said(parts, PartKind.TEXT), found) == (thoughts, text, stop)
        assert len(calls(parts)) == num_calls
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls(parts))


PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", '{"name": "add", "arguments": {"a": ', "1}}", "a", "b", " \n", "<"]
)


@given(pieces=st.lists(PIECES, max_size=12), stops=st.lists(st.text("ab< \n1", min_size=1, max_size=3), max_size=3))
def test_text_is_cut_before_the_first_stop_string_in_it(pieces: list[str], stops: list[str]) -> None:
    written = "".join(pieces)
    own = reader("hermes", thinks=False)
    plain = [*own.push(written), *own.finish()]
    parts, stop = read(list(written), stops, thinks=False)
    whole, text = said(plain, PartKind.TEXT), said(parts, PartKind.TEXT)
    assert whole.startswith(text)
    assert calls(plain)[: len(calls(parts))] == calls(parts)
    if stop is None:
        assert (text, calls(parts)) == (whole, calls(plain))
    else:
        before, found, _ = whole[len(text) :].partition(stop)
        assert (before.strip(), found) == ("", stop)  # white space behind a call is given out with what follows it


@given(text=st.text("ab<", max_size=30), stops=st.lists(st.text("ab<", min_size=1, max_size=4), max_size=4))
def test_stop_strings_end_a_text_however_it_is_cut(text: str, stops: list[str]) -> None:
    def cut(size: int) -> tuple[str, str | None]:
        scanner, out = StopScanner(stops), ""
        for at in range(0, len(text), size):
            piece, stop = scanner.push(text[at : at + size])
            out += piece
            assert not any(each in out for each in stops)
            if stop is not None:
                return out, stop
        return out + scanner.finish()[0], None

    sent, stop = cut(1)
    assert all(cut(size) == (sent, stop) for size in (2, 3, 4, 30))
    assert (stop is None) == (sent == text) == (not any(each in text for each in stops))
    assert stop is None or (stop in stops and text.startswith(sent + stop))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", ["}", "\n", '"', "a"])
async def test_stop_string_does_not_cut_a_call(bench: MakeBench, stop: str, stream: bool) -> None:
    async with bench(tool_format="hermes") as b:
        b.decode.script = speaking([*b.ids(CALL), END])
        asked: Any = {"model": MODEL_NAME, "messages": [USER], "tools": TOOLS, "stop": stop}
        if stream:
            async with b.client.chat.completions.stream(**asked) as running:
                answer: Any = await running.get_final_completion()
        else:
            answer = await b.client.chat.completions.create(**asked)
        (call,) = answer.choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"a": {"b": "x\n\ny STOP"}}
        assert (answer.choices[0].message.content or "", answer.choices[0].finish_reason) == ("", "tool_calls")


async def test_stop_string_in_the_text_ends_it_when_tools_are_offered(bench: MakeBench) -> None:
    async with bench(tool_format="hermes") as b:
        ids = b.ids("one STOP two")
        b.decode.script = speaking([*ids, *ids], finish=None)
        asked: Any = {"model": MODEL_NAME, "messages": [USER], "tools": TOOLS, "stop": [" STOP"]}
        answer: Any = await b.client.chat.completions.create(**asked)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("one", "stop")
        assert answer.usage.completion_tokens == len(b.ids("one STOP"))
        await b.decode.until(lambda: len(b.decode.cancelled) == 1)


@given(st.text("ab", max_size=9), st.text("ab", min_size=1, max_size=6))
def test_the_longest_end_that_begins_it_and_never_all_of_it(text: str, stop: str) -> None:
    lengths = range(min(len(stop) - 1, len(text)) + 1)
    assert overlap(text, stop) == max(length for length in lengths if text.endswith(stop[:length]))
