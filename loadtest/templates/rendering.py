"""Compares what the gateway renders with what transformers renders."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from loadtest.templates.conversations import Body, Message
from weft.errors import InvalidRequest, ModelFailed
from weft_services.gateway.dialects.openai_requests import parse_chat
from weft_services.gateway.generation import Conversation
from weft_services.gateway.text.chat_template import ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


class Outcome(StrEnum):
    """How the gateway's text compares with that of transformers."""

    SAME = "same text"
    SAME_EMPTY = "same as with empty text for null content"
    REFUSED = "both refuse"
    SYSTEM = "developer rendered as system"
    ALONE = "only Weft renders it"
    KEPT = "Weft keeps text that transformers loses"
    OTHER = "another text"
    REFUSED_ALONE = "only Weft refuses it"
    CRASH = "crash"


@dataclass(frozen=True, slots=True)
class Render:
    """One render: its outcome, both texts, and the error of each."""

    outcome: Outcome
    own: str = ""
    expected: str = ""
    error: str = ""


def compare(source: str, template: ChatTemplate, body: Body, special: dict[str, str]) -> Render:
    """Render one conversation by both and compare."""
    expected, error = reference(source, body, special)
    try:
        own = own_text(template, body)
    except (InvalidRequest, ModelFailed) as refused:
        text = expected if expected is not None else reference(source, with_text(body), special)[0]
        return Render(
            Outcome.REFUSED if text is None else Outcome.REFUSED_ALONE, expected=text or "", error=str(refused)
        )
    except BaseException as fault:  # a panic of minijinja derives from it
        if isinstance(fault, KeyboardInterrupt):
            raise
        return Render(Outcome.CRASH, error=repr(fault))
    if own == expected:
        return Render(Outcome.SAME)
    for outcome, other in ((Outcome.SAME_EMPTY, with_text(body)), (Outcome.SYSTEM, _with_system(body))):
        if own == reference(source, other, special)[0]:
            return Render(outcome)
    if expected is None:
        return Render(Outcome.ALONE, own, error=error)
    is_kept = texts_in(own, body) > texts_in(expected, body)
    return Render(Outcome.KEPT if is_kept else Outcome.OTHER, own, expected)


def own_text(template: ChatTemplate, body: Body) -> str:
    """Return the gateway's text. Raises InvalidRequest, ModelFailed."""
    (asked,) = parse_chat(json.dumps({"model": "m", **body}).encode()).prompts
    assert isinstance(asked, Conversation)
    return template.render(asked)


def reference(source: str, body: Body, special: dict[str, str]) -> tuple[str | None, str]:
    """Return the text of transformers, or None and the error."""
    try:
        options: dict[str, Any] = {**special, **body.get("chat_template_kwargs", {})}
        rendered: Any = render_jinja_template(
            conversations=[[_plain(each, body.get("has_objects", True)) for each in body["messages"]]],
            tools=body.get("tools"),
            chat_template=source,
            add_generation_prompt=body.get("add_generation_prompt", True),
            continue_final_message=body.get("continue_final_message", False),
            **options,
        )
    except Exception as error:  # templates fail in every way that Python can
        return None, f"{type(error).__name__}: {error}"
    return str(rendered[0][0]), ""


def texts_in(rendered: str, body: Body) -> int:
    """Return how many texts and names of calls of a conversation are in a rendered text."""
    found = [each["content"].strip() for each in map(_plain, body["messages"]) if isinstance(each["content"], str)]
    found += [made["function"]["name"] for each in body["messages"] for made in each.get("tool_calls", ())]
    return sum(rendered.count(each) for each in set(found) if each)


def _plain(message: Message, has_objects: bool = True) -> Message:
    """Return the message as users of transformers write it: text is text, arguments are objects where they can be."""
    plain = dict(message)
    if isinstance(plain["content"], list):
        plain["content"] = "".join(part["text"] for part in plain["content"])
    if has_objects and "tool_calls" in plain:
        plain["tool_calls"] = [_with_object(made) for made in plain["tool_calls"]]
    return plain


def _with_object(made: dict[str, Any]) -> dict[str, Any]:
    try:
        arguments = json.loads(made["function"]["arguments"])
    except ValueError:
        return made
    return {**made, "function": {**made["function"], "arguments": arguments}}


def with_text(body: Body) -> Body:
    """Return a conversation with empty text for content that is null."""
    return {**body, "messages": [{**each, "content": each["content"] or ""} for each in body["messages"]]}


def _with_system(body: Body) -> Body:
    roles = {"developer": "system"}
    return {**body, "messages": [{**each, "role": roles.get(each["role"], each["role"])} for each in body["messages"]]}
