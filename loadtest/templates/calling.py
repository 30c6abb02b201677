"""Renders an assistant's calls, cuts after the generation prompt, and reads the rest as the answer of a model.

The gateway loads each template with the files of weft-nano, prepares a request and reads the answer, as it serves it.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from loadtest.report import ROOT
from loadtest.templates.conversations import TIME, WEATHER, Body, Message, answer, call, calls, user, with_tools
from loadtest.templates.rendering import SPECIAL, own_text, reference, with_text
from weft.errors import WeftError
from weft_services.gateway.dialects.openai_requests import parse_chat
from weft_services.gateway.mesh.prepare import prepare
from weft_services.gateway.model import TEMPLATE_FILES, ServedModel, load_model
from weft_services.gateway.text.assistant import THOUGHT_TAGS
from weft_services.gateway.text.chat_template import ChatTemplate
from weft_services.gateway.text.parts import Part, PartKind

NANO = ROOT / "models" / "weft-nano"
FILES = ("config.json", "tokenizer.json", "generation_config.json")
LIMIT = 1 << 20
QUESTION = user("How shall I go out?")
CLOSED: dict[str, Any] = {"add_generation_prompt": False}
# Enough to see where the answer ends.
SAID = "So it is."
# What templates write for missing content.
NULL = re.compile(r"\b(None|null)\b")
THOUGHT, TEXT = "I need it.", "Let me look."
# A token that ends a turn: engines stop at it and do not return it.
END_TOKEN = re.compile(r"\s*(<[^<>\s]*>|\[[A-Z_/]+\])\s*$")
TWO = (call(1), call(2, "get_time", {"zone": "UTC"}))
CASES: dict[str, Message] = {
    "one": calls(call()),
    "two": calls(*TWO),
    "after thoughts": calls(call(), reasoning_content=THOUGHT),
    "after text": calls(call(), content=TEXT),
    "after both": calls(call(), content=TEXT, reasoning_content=THOUGHT),
}


class Reading(StrEnum):
    """What became of the calls of one template."""

    READ = "read back"
    PARTLY = "read back in part"
    WRONG = "wrong format"
    UNKNOWN = "no format"
    UNJUDGED = "no verdict"
    NONE = "renders no calls"
    UNLOADED = "not loaded"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The reading of a template, the format found, and each case that failed with the reason."""

    reading: Reading
    tool_format: str = "none"
    failures: tuple[str, ...] = ()


def judge(source: str) -> Verdict:
    """Return what becomes of the calls that a template writes."""
    problem = ""
    for is_alone in (True, False):  # Some templates render only conversations with tools.
        try:
            with served(source, is_alone) as model:
                return _judge(source, model)
        except WeftError as error:
            problem = problem or str(error)
    return Verdict(Reading.UNLOADED, failures=(problem[-200:],))


@contextmanager
def served(source: str, is_alone: bool = True) -> Iterator[ServedModel]:
    """Load a template as that of a served model, alone or beside another for chats without tools.

    Raises BadCheckpoint.
    """
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for file in FILES:
            os.symlink(NANO / file, directory / file)
        (directory / "tokenizer_config.json").write_text(json.dumps(SPECIAL))
        for file in TEMPLATE_FILES.values():
            (directory / file).parent.mkdir(exist_ok=True)
        (directory / TEMPLATE_FILES["default" if is_alone else "tool_use"]).write_text(source)
        if not is_alone:
            os.symlink(NANO / TEMPLATE_FILES["default"], directory / TEMPLATE_FILES["default"])
        yield load_model(directory, "model")


def _judge(source: str, model: ServedModel) -> Verdict:
    tool_format = model.tool_format.name if model.tool_format else "none"
    markers = model.tool_format.markers if model.tool_format else ()
    failures: dict[str, str] = {}
    num_judged = 0
    for case, message in CASES.items():
        if (written := answer_of(source, message, markers)) is None:
            continue
        num_judged += 1
        if (failure := _failure(model, written, message)) is not None:
            failures[case] = failure
    told = tuple(f"{case}: {failure}" for case, failure in failures.items())
    if not num_judged:
        is_written = rendered_call(source, CASES["one"]) is not None
        return Verdict(Reading.UNJUDGED if is_written else Reading.NONE, tool_format)
    if model.tool_format is None:
        return Verdict(Reading.UNKNOWN, tool_format, told)
    if "one" in failures:
        return Verdict(Reading.WRONG, tool_format, told)
    return Verdict(Reading.PARTLY if failures else Reading.READ, tool_format, told)


def rendered_call(source: str, message: Message) -> str | None:
    """Return the conversation that ends with this message; None if the template refuses or omits a call of it."""
    names = [made["function"]["name"] for made in message["tool_calls"]]
    values = [each for made in message["tool_calls"] for each in json.loads(made["function"]["arguments"]).values()]
    for text in _renders(source, with_tools(QUESTION, message, **CLOSED)):
        behind = text.rpartition(QUESTION["content"])[2]
        if all(each in behind for each in (*names, *values)) and NULL.search(behind) is None:
            return text
    return None


def _renders(source: str, body: Body) -> Iterator[str]:
    """Yield the renders of transformers, in the forms that templates need, then that of the gateway."""
    forms = (body, with_text(body), _with_named_ids(with_text(body)))
    for form in forms:
        for has_objects in (True, False):
            text, _ = reference(source, {**form, "has_objects": has_objects}, SPECIAL)
            if text is not None:
                yield text
    with suppress(WeftError):
        yield own_text(ChatTemplate(source, SPECIAL), body)


def answer_of(source: str, message: Message, markers: Sequence[str] = ()) -> str | None:
    """Return what a model answers behind the prompt; None if the template's text does not show it.

    `markers`: the ends of turns that are part of calls.
    """
    text = rendered_call(source, message)
    prompt, _ = reference(source, with_tools(QUESTION), SPECIAL)
    if text is None or prompt is None:
        return None
    said, _ = reference(source, with_tools(QUESTION, answer(SAID), **CLOSED), SPECIAL)
    end = (said or "").rpartition(SAID)[2].strip()
    text = text.rstrip().removesuffix(end) if end else text
    starts = (each for each in (prompt, prompt.rstrip()) if text.startswith(each))
    start = next(starts, None)
    written = _behind_thoughts(prompt, text) if start is None else text[len(start) :]
    return None if written is None or (end and end in written and end not in markers) else written


def _behind_thoughts(prompt: str, text: str) -> str | None:
    """Return the answer where the prompt opens thoughts, or closes empty ones, and the history has none."""
    shared = next((at for at, (own, other) in enumerate(zip(text, prompt, strict=False)) if own != other), len(text))
    for opening, closing in THOUGHT_TAGS:
        at = prompt.rfind(opening)
        if max(0, at) <= shared < at + len(opening) and text.startswith(prompt[:at]):
            written = text[at:].lstrip()
            if closing in prompt[at:]:
                return written.removeprefix(closing)
            return written if written.startswith((opening, closing)) else f"\n{closing}\n\n{written}"
    return None


def _with_named_ids(body: Body) -> Body:
    """Return a conversation for templates that write a call's id instead of its name, as Kimi's."""
    named = [
        {
            **each,
            "tool_calls": [
                {**made, "id": f"functions.{made['function']['name']}:{place}"}
                for place, made in enumerate(each["tool_calls"])
            ],
        }
        if "tool_calls" in each
        else each
        for each in body["messages"]
    ]
    return {**body, "messages": named}


def _failure(model: ServedModel, written: str, message: Message) -> str | None:
    """Return why an answer is not read as it was written; None if it is."""
    body = {"model": "model", "messages": [QUESTION], "tools": [WEATHER, TIME]}
    prepared = prepare(parse_chat(json.dumps(body).encode()), model, None, LIMIT)
    reader = prepared.reader(0)
    parts = [part for letter in written for part in reader.push(letter)] + reader.finish()
    expected = [(made["function"]["name"], json.loads(made["function"]["arguments"])) for made in message["tool_calls"]]
    if (found := _calls(parts)) != expected:
        return f"calls {found} of {written!r}"
    text, thoughts = (_said(parts, kind) for kind in (PartKind.TEXT, PartKind.REASONING))
    markers = model.tool_format.markers if model.tool_format else ()
    while (end := END_TOKEN.search(text)) and end[1] not in markers:
        text = text[: end.start()].strip()
    if not text and message["content"] and thoughts == message["content"]:
        return None  # gpt-oss renders text before a call as a thought
    for name, got, meant in (
        ("text", text, message["content"]),
        ("thoughts", thoughts, message.get("reasoning_content")),
    ):
        if got not in ("", meant) or (meant and meant in written and got != meant):
            return f"{name} {got!r} of {written!r}"
    return None


def _calls(parts: list[Part]) -> list[tuple[str, Any]]:
    found: list[tuple[str, str]] = []
    for part in parts:
        if part.kind is PartKind.CALL:
            found.append((part.text, ""))
        elif part.kind is PartKind.ARGUMENTS:
            found[-1] = (found[-1][0], found[-1][1] + part.text)
    return [(name, json.loads(arguments)) for name, arguments in found]


def _said(parts: list[Part], kind: PartKind) -> str:
    return "".join(part.text for part in parts if part.kind is kind).strip()
