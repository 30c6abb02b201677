"""Renders conversations with the model's own chat template: minijinja with fuel, set up as transformers sets up Jinja.

The template comes from the model directory only, never from a request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import partial
from typing import Any

import minijinja

from weft.errors import BadCheckpoint, InvalidRequest
from weft_services.gateway.generation import Conversation
from weft_services.gateway.text.histories import Histories
from weft_services.gateway.text.seal import Seal

# A 4096-message conversation needs well under a tenth of this; a loop bomb is stopped after some 100 ms.
FUEL = 10_000_000
# put where an answer goes on that has begun, to be found again; from Unicode's private area
HERE = "\ue0fe"
# templates that tell an assistant's calls by what it does not say
IS_NONE = re.compile(r"content['\"]?\]?\s+is\s+(not\s+)?none", re.IGNORECASE)
# transformers' own tag around what a model is trained to say; `with` makes a scope as it does, and writes as much
TRAINED = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")


class _Refused(Exception):
    """The template itself called raise_exception."""


def _refuse(message: str) -> None:
    raise _Refused(message)


class _Float:
    """A number with a point, to be written as Python writes it: minijinja writes 1e-07 and 2.0 in ways of its own."""

    __slots__ = ("value",)

    def __init__(self, value: float) -> None:
        self.value = value

    def __repr__(self) -> str:
        return repr(self.value)


def _with_floats(value: Any) -> Any:
    """The same, floats replaced. What has none, as nearly everything, is not copied."""
    if isinstance(value, float):
        return _Float(value)
    if isinstance(value, dict):
        fields = {name: _with_floats(each) for name, each in value.items()}
        return fields if any(fields[name] is not value[name] for name in value) else value
    if isinstance(value, list | tuple):
        items = [_with_floats(each) for each in value]
        return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
    return value


def _plain(value: Any) -> float:
    if isinstance(value, _Float):
        return value.value
    raise TypeError(f"{type(value).__name__} is no JSON")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=_plain
    )


def _now(form: str) -> str:
    return datetime.now().strftime(form)  # local time, as transformers gives templates


# Jinja's own, where minijinja's differ. What is not there comes as None.
_FILTERS: dict[str, Callable[..., Any]] = {
    "tojson": _to_json,
    "items": lambda value: list(dict(value or {}).items()),
    "length": lambda value: 0 if value is None else len(value),
    "trim": lambda value, characters=None: "" if value is None else str(value).strip(characters),
}
_TESTS: dict[str, Callable[[Any], bool]] = {
    "iterable": lambda value: isinstance(value, Iterable),
    "sequence": lambda value: isinstance(value, list | tuple | str | dict),
    "number": lambda value: isinstance(value, int | float | _Float),
    "float": lambda value: isinstance(value, float | _Float),
    "callable": lambda value: False,
}


class ChatTemplate:
    """One compiled template. `special_tokens` are bos_token, eos_token and the like, as text."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        tool_source: str | None = None,
        seal: Seal | None = None,
    ) -> None:
        """`tool_source`: another template, for conversations that have tools. `seal`: is on the special tokens of what
        is rendered, but on nobody else's."""
        self._opened = seal.opened if seal else str
        if seal:
            source, tool_source = seal.closed(source), seal.closed(tool_source or "")
            special_tokens = {name: seal.closed(token) for name, token in special_tokens.items()}
        self.all_sources = f"{source}\n{tool_source}" if tool_source else source
        sources = {"chat": source, "tool_use": tool_source or source}
        self._histories = {name: Histories(partial(self._sample, name)) for name in sources}
        self._knows_developers = "developer" in self.all_sources
        self._asks_for_none = IS_NONE.search(self.all_sources) is not None
        self._special_tokens = dict(special_tokens)
        self._environment = minijinja.Environment(
            fuel=FUEL,
            debug=False,
            trim_blocks=True,
            lstrip_blocks=True,
            pycompat=True,
            filters=_FILTERS,
            tests=_TESTS,
        )
        self._environment.add_global("raise_exception", _refuse)
        self._environment.add_global("strftime_now", _now)
        try:
            for name, text in sources.items():
                self._environment.add_template(name, TRAINED.sub(r"{%\1 \2with \3%}", text))
        except minijinja.TemplateError as error:
            told = self._opened(str(error.message))
            raise BadCheckpoint(f"chat template does not compile: {told}") from error

    def render(self, conversation: Conversation, field: str = "messages") -> str:
        """The prompt text, up to where the assistant begins to speak, or goes on. Raises InvalidRequest naming the
        field."""
        messages = [self._known(message) for message in conversation.messages]
        if not conversation.is_continued:
            return self._rendered(conversation, messages, field)
        last = {**messages[-1], "content": messages[-1]["content"] + HERE}
        text, mark, _ = self._rendered(conversation, [*messages[:-1], last], field).rpartition(HERE)
        if not mark:
            raise InvalidRequest("the chat template does not let this message be continued", field)
        return text

    def _sample(self, name: str, messages: list[dict[str, Any]]) -> str:
        return self._with_either(name, Conversation(()), [self._known(message) for message in messages], "messages")

    def _rendered(self, conversation: Conversation, messages: list[dict[str, Any]], field: str) -> str:
        """As the template has it, and changed only where it refuses this or would leave words out."""
        name = "tool_use" if conversation.tools else "chat"
        histories = self._histories[name]
        whole = histories.whole(messages)
        try:
            return self._with_either(name, conversation, whole, field)
        except InvalidRequest as error:
            if (taken := histories.taken(messages)) == whole:
                raise
            try:
                return self._with_either(name, conversation, taken, field)
            except InvalidRequest:
                raise error from None

    def _with_either(self, name: str, conversation: Conversation, messages: list[dict[str, Any]], field: str) -> str:
        """With arguments as objects, or as text."""
        try:
            return self._tried(name, conversation, messages, field)
        except InvalidRequest as error:
            # most templates want arguments as an object; DeepSeek's own put what is a text between other text
            texts = [_with_texts({**message, "content": message["content"] or ""}) for message in messages]
            if not isinstance(error.__cause__, minijinja.TemplateError) or texts == messages:
                raise
            try:
                return self._tried(name, conversation, texts, field)
            except InvalidRequest:
                raise error from None

    def _tried(self, name: str, conversation: Conversation, messages: list[dict[str, Any]], field: str) -> str:
        try:
            return self._environment.render_template(
                name,
                messages=messages,
                tools=_with_floats(list(conversation.tools)) or None,
                documents=None,  # as transformers gives it: templates ask whether it is none
                add_generation_prompt=conversation.is_open and not conversation.is_continued,
                **{**conversation.kwargs, **self._special_tokens},
            )
        except _Refused as error:
            raise InvalidRequest(self._opened(str(error)), field) from error
        except minijinja.TemplateError as error:
            told = self._opened(str(error.message))
            raise InvalidRequest(f"the chat template cannot render these messages: {told}", field) from error
        except BaseException as error:
            # of our own filters, as for arguments that are no object; or a fault of the library's, such as [][::-1],
            # which is no Exception and would pass by everybody
            if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
                raise
            raise InvalidRequest("the chat template cannot render these messages", field) from error

    def _known(self, message: dict[str, Any]) -> dict[str, Any]:
        """Templates drop, or refuse, roles that they do not know: to most of them a developer is the system."""
        if message["role"] == "developer" and not self._knows_developers:
            return {**message, "role": "system"}
        if "tool_calls" in message:
            content = None if self._asks_for_none and message["content"] is None else message["content"] or ""
            return {**message, "content": content, "tool_calls": _with_floats(message["tool_calls"])}
        return message


def _with_texts(message: dict[str, Any]) -> dict[str, Any]:
    """The same with the arguments of its calls as JSON text."""
    if "tool_calls" not in message:
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    texts = [
        {**function, "arguments": _to_json(function["arguments"])}
        if isinstance(function["arguments"], dict)
        else function
        for function in functions
    ]
    calls = zip(message["tool_calls"], texts, strict=True)
    return {**message, "tool_calls": [{**call, "function": function} for call, function in calls]}
