"""Rewrites conversations that a chat template rejects, or renders with missing text.

Clients bring histories from other servers: system messages in the middle, several calls in one message, foreign call
ids. A conversation that the template renders completely stays unchanged. Samples show once per template which rewrites
it needs; the others never run for it.
"""

from __future__ import annotations

import hashlib
import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from weft.errors import InvalidRequest, ModelFailed

Message = dict[str, Any]
Messages = list[Message]
SYSTEMS = ("system", "developer")
# Separates texts of one role that are merged into one message.
BETWEEN = "\n\n"
# Fillers for a turn that the template requires and the conversation lacks.
USER_TURN, ASSISTANT_TURN = "Hello.", "OK."
SHORT_ID = re.compile(r"[A-Za-z0-9]{9}", re.ASCII)
NAMED_ID = re.compile(r"functions\.[^:]+:\d+", re.ASCII)
_LETTERS = string.ascii_letters + string.digits


def one_system(messages: Messages) -> Messages:
    """Merge leading system messages into one; quote later ones as user messages in their place."""
    num_first = next((place for place, each in enumerate(messages) if each["role"] not in SYSTEMS), len(messages))
    first = [_joined(messages[:num_first])] if num_first else []
    return first + [_quoted(each) if each["role"] in SYSTEMS else each for each in messages[num_first:]]


def user_behind_system(messages: Messages) -> Messages:
    """Turn the last message of a conversation of system messages into a user message."""
    if any(each["role"] not in SYSTEMS for each in messages):
        return messages
    return [*messages[:-1], {**messages[-1], "role": "user"}]


def no_system(messages: Messages) -> Messages:
    """Turn system messages into user messages."""
    return [{**each, "role": "user"} if each["role"] in SYSTEMS else each for each in messages]


def short_ids(messages: Messages) -> Messages:
    """Replace call ids by nine letters and digits; the same id maps to the same value in every request."""
    return [_with_ids(message, short_id) for message in messages]


def named_ids(messages: Messages) -> Messages:
    """Replace call ids by ids that name the function, as Kimi's templates require.

    Results keep matching their calls.
    """
    new: dict[str, str] = {}
    num_calls = 0
    out: Messages = []
    for message in messages:
        for call in message.get("tool_calls") or ():
            own = str(call.get("id") or "")
            named = f"functions.{call['function']['name']}:{num_calls}"
            new[own] = own if NAMED_ID.fullmatch(own) else named
            num_calls += 1
        out.append(_with_ids(message, lambda own: new.get(own, own)))
    return out


def single_calls(messages: Messages) -> Messages:
    """Split messages with several calls into one call each, followed by its result."""
    out: Messages = []
    left = list(messages)
    while left:
        message = left.pop(0)
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            out.append(message)
            continue
        num_results = next((place for place, each in enumerate(left) if each["role"] != "tool"), len(left))
        results, left = left[:num_results], left[num_results:]
        for place, call in enumerate(calls):
            text = message["content"] if place == 0 else "" if message["content"] is not None else None
            first = message if place == 0 else {"role": "assistant"}
            out.append({**first, "content": text, "tool_calls": [call]})
            if (
                own := next((each for each in results if each.get("tool_call_id") == call.get("id")), None)
            ) is not None:
                results.remove(own)
                out.append(own)
        out += results
    return out


def only_thoughts_before_calls(messages: Messages) -> Messages:
    """Move text before calls to the thoughts before them; gpt-oss's template rejects both in one message."""
    out: Messages = []
    for message in messages:
        names = [name for name in ("reasoning_content", "thinking") if message.get(name)]
        if message.get("tool_calls") and message["content"] and names:
            thoughts = {name: BETWEEN.join((message[name], message["content"])) for name in names}
            message = {**message, **thoughts, "content": ""}
        out.append(message)
    return out


def object_arguments(messages: Messages) -> Messages:
    """Wrap call arguments that are not a JSON object into an object."""
    return [
        {**message, "tool_calls": [_with_object(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def no_empty_turns(messages: Messages) -> Messages:
    """Drop assistant messages without content, calls and thoughts."""
    said = ("content", "tool_calls", "reasoning_content")
    return [each for each in messages if each["role"] != "assistant" or any(each.get(name) for name in said)]


def some_user(messages: Messages) -> Messages:
    """Insert a user message into a conversation without one, for example a truncated one."""
    if any(each["role"] == "user" for each in messages):
        return messages
    num_first = next((place for place, each in enumerate(messages) if each["role"] not in SYSTEMS), len(messages))
    return [*messages[:num_first], {"role": "user", "content": USER_TURN}, *messages[num_first:]]


def alternating(messages: Messages) -> Messages:
    """Make user and assistant messages alternate, starting with a user message."""
    out: Messages = []
    for message in messages:
        role, last = message["role"], out[-1] if out else {}
        before = last.get("role")
        if before in (None, *SYSTEMS) and role in ("assistant", "tool"):
            out.append({"role": "user", "content": USER_TURN})
        elif role == "user" and (before == "tool" or last.get("tool_calls")):
            out.append({"role": "assistant", "content": ASSISTANT_TURN})
        elif role == before and role != "tool" and not last.get("tool_calls"):
            message = _joined([out.pop(), message])
        out.append(message)
    return out


def _joined(messages: Sequence[Message]) -> Message:
    joined: Message = {}
    for message in messages:
        joined |= message
    for name in ("content", "reasoning_content"):
        if texts := [each[name] for each in messages if each.get(name)]:
            joined[name] = BETWEEN.join(texts)
    return {**joined, "role": messages[0]["role"]} if messages else joined


def _quoted(message: Message) -> Message:
    return {"role": "user", "content": f"<system>\n{message['content']}\n</system>"}


def _with_ids(message: Message, change: Callable[[str], str]) -> Message:
    changed = dict(message)
    if "tool_call_id" in message:
        changed["tool_call_id"] = change(message["tool_call_id"])
    if message.get("tool_calls"):
        changed["tool_calls"] = [{**call, "id": change(str(call.get("id") or ""))} for call in message["tool_calls"]]
    return changed


def short_id(call_id: str) -> str:
    if SHORT_ID.fullmatch(call_id):
        return call_id
    digest = hashlib.blake2b(call_id.encode(errors="replace"), digest_size=9).digest()
    return "".join(_LETTERS[byte % len(_LETTERS)] for byte in digest)


def _with_object(call: Message) -> Message:
    function = call["function"]
    arguments = function.get("arguments")
    is_object = isinstance(arguments, dict)
    return call if is_object else {**call, "function": {**function, "arguments": {"arguments": arguments}}}


class TemplateVerdict(Enum):
    """How a template renders a rewrite's samples unchanged, if it renders all text after the rewrite."""

    NONE = auto()  # all text, or the rewrite does not help
    REFUSED = auto()
    LOST = auto()  # rendered with missing text


@dataclass(frozen=True, slots=True)
class HistoryRewrite:
    """A rewrite, and short conversations that show whether a template needs it.

    `is_last_resort`: it changes only conversations that the template rejects.
    """

    apply: Callable[[Messages], Messages]
    samples: tuple[Messages, ...]
    is_last_resort: bool = False


def _say(*turns: str) -> Messages:
    """Build messages from `role:content` strings."""
    return [dict(zip(("role", "content"), turn.split(":"), strict=True)) for turn in turns]


def _call(*ids: str, arguments: Any = None) -> Messages:
    """Build calls and their results; the arguments of a call contain its position."""
    calls = [
        {
            "id": each,
            "type": "function",
            "function": {"name": "multiply", "arguments": arguments or {"x": f"argument{place}"}},
        }
        for place, each in enumerate(ids)
    ]
    results = [{"role": "tool", "tool_call_id": each, "content": f"result{place}"} for place, each in enumerate(ids)]
    return [{"role": "assistant", "content": None, "tool_calls": calls}, *results]


_USER, _TALK = _say("user:asked"), _say("user:asked", "assistant:said")
_ID, _OTHER_ID = "123456789", "abcdefghi"
REWRITES = (
    HistoryRewrite(user_behind_system, (_say("system:rule"),)),
    HistoryRewrite(
        one_system,
        (
            _say("system:first", "system:second", "user:asked"),
            _say("system:first", "user:asked", "assistant:said", "system:second", "user:more"),
            _say("user:asked", "system:second"),
        ),
    ),
    HistoryRewrite(no_system, (_say("system:rule", "user:asked"),)),
    HistoryRewrite(short_ids, (_USER + _call("call_0123456789abcdef"),)),
    HistoryRewrite(named_ids, (_USER + _call("call_0123456789abcdef"),)),
    HistoryRewrite(single_calls, (_USER + _call(_ID, _OTHER_ID),)),
    HistoryRewrite(
        only_thoughts_before_calls,
        ([*_USER, {**_call(_ID)[0], "content": "said", "reasoning_content": "thought"}, *_call(_ID)[1:]],),
        is_last_resort=True,
    ),
    HistoryRewrite(object_arguments, (_USER + _call(_ID, arguments="broken"),)),
    HistoryRewrite(no_empty_turns, (_say("user:asked", "assistant:", "user:more"),)),
    HistoryRewrite(some_user, (_say("system:rule", "assistant:said"),)),
    HistoryRewrite(
        alternating,
        (
            _say("user:asked", "user:more"),
            _say("assistant:said", "user:asked"),
            [*_USER, *_call(_ID), *_say("user:more")],
        ),
    ),
)


OF_SYSTEMS = (user_behind_system, one_system, no_system)


@dataclass(frozen=True, slots=True)
class NeededRewrites:
    """The rewrites that one template needs, in order.

    - `against_losses`: for conversations of which the template would silently drop text.
    - `against_refusals`: these and the ones for conversations that the template rejects.
    """

    against_losses: tuple[HistoryRewrite, ...]
    against_refusals: tuple[HistoryRewrite, ...]

    def are_spared(self, messages: Messages, rendered: str) -> bool:
        """True if the unchanged text of a conversation needs no rewrite against losses: no system message is lost."""
        is_of_systems = all(step.apply in OF_SYSTEMS for step in self.against_losses)
        systems = [message["content"].strip() for message in messages if message["role"] in SYSTEMS]
        return is_of_systems and all(each in rendered for each in systems)


def find_needed_rewrites(render: Callable[[Messages], str]) -> NeededRewrites:
    """Try the samples; `render` renders messages, or raises InvalidRequest or ModelFailed."""
    verdicts = [max((_verdict(render, step, each) for each in step.samples), key=_WORST.index) for step in REWRITES]
    found = list(zip(REWRITES, verdicts, strict=True))
    return NeededRewrites(
        tuple(step for step, verdict in found if verdict is TemplateVerdict.LOST and not step.is_last_resort),
        tuple(step for step, verdict in found if verdict is not TemplateVerdict.NONE),
    )


def rewritten(messages: Messages, steps: Sequence[HistoryRewrite]) -> Messages:
    """Return the messages after all steps."""
    for step in steps:
        messages = step.apply(messages)
    return messages


def _verdict(render: Callable[[Messages], str], step: HistoryRewrite, sample: Messages) -> TemplateVerdict:
    words = {word for message in sample for word in _words(message)}
    is_refused = (text := _try_render(render, sample)) is None
    if text is not None and all(word in text for word in words):
        return TemplateVerdict.NONE
    changed = step.apply(sample)
    for messages in (changed, alternating(changed)):
        text = _try_render(render, messages)
        if text is not None and all(word in text for word in words):
            return TemplateVerdict.REFUSED if is_refused else TemplateVerdict.LOST
    return TemplateVerdict.NONE


def _try_render(render: Callable[[Messages], str], messages: Messages) -> str | None:
    try:
        return render(messages)
    except (InvalidRequest, ModelFailed):
        return None


# Of several samples the worst verdict counts.
_WORST = (TemplateVerdict.NONE, TemplateVerdict.REFUSED, TemplateVerdict.LOST)


def _words(message: Message) -> list[str]:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    arguments = [each["arguments"]["x"] for each in functions if isinstance(each["arguments"], dict)]
    return [message["content"] or "", *(each["name"] for each in functions), *arguments]
