"""Renders conversations with the model's chat template, by minijinja with fuel and the settings of transformers.

Where minijinja fails or differs, Jinja renders instead; see `jinja_reference`. The template comes from the model
directory, never from a request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any

import minijinja

from weft.errors import BadCheckpoint, InvalidRequest, ModelFailed
from weft_services.gateway.generation import Conversation
from weft_services.gateway.text.history_rewrite import HistoryRewriter
from weft_services.gateway.text.jinja_reference import JinjaReference, TemplateFault, TemplateRefused
from weft_services.gateway.text.special_tokens import SpecialTokenGuard

# A 4096-message conversation needs less than a tenth of this; an endless loop ends after about 100 ms.
FUEL = 10_000_000
# Marks where a continued answer goes on; from Unicode's private use area.
HERE = "\ue0fe"
# Templates that recognize a message with calls by its missing content.
IS_NONE = re.compile(r"content['\"]?\]?\s+is\s+(not\s+)?none", re.IGNORECASE)
# Transformers' tag around trained text. `with` opens the same scope and renders the same.
TRAINED = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")


class _Refused(Exception):
    """The template rejected the conversation by calling raise_exception."""


class _QuickFault(Exception):
    """minijinja cannot render the template; Jinja may."""


class _OutOfFuel(Exception):
    """The template took too many steps."""


def _refuse(message: str) -> None:
    raise _Refused(message)


class _Float:
    """A float that renders as in Python: minijinja writes 1e-07 and 2.0 differently."""

    __slots__ = ("value",)

    def __init__(self, value: float) -> None:
        self.value = value

    def __repr__(self) -> str:
        return repr(self.value)


def _with_floats(value: Any) -> Any:
    """Replace the floats in a value. A value without floats, the usual case, is not copied."""
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
    raise TypeError(f"{type(value).__name__} is not JSON")


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
    return datetime.now().strftime(form)  # local time, as transformers passes it to templates


# Jinja's versions of the filters that differ in minijinja. Undefined values arrive as None.
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


def _quick_environment(sources: Mapping[str, str]) -> minijinja.Environment | None:
    """Return the minijinja environment; None if minijinja cannot parse the template."""
    environment = minijinja.Environment(
        fuel=FUEL,
        debug=False,
        trim_blocks=True,
        lstrip_blocks=True,
        pycompat=True,
        filters=_FILTERS,
        tests=_TESTS,
    )
    environment.add_global("raise_exception", _refuse)
    environment.add_global("strftime_now", _now)
    try:
        for name, text in sources.items():
            environment.add_template(name, text)
    except minijinja.TemplateError:
        return None
    return environment


def _render_quickly(environment: minijinja.Environment, name: str, context: dict[str, Any]) -> str:
    messages = [
        {**each, "tool_calls": _with_floats(each["tool_calls"])} if "tool_calls" in each else each
        for each in context["messages"]
    ]
    tools = _with_floats(context["tools"])
    try:
        return environment.render_template(name, **{**context, "messages": messages, "tools": tools})
    except _Refused:
        raise
    except minijinja.TemplateError as error:
        kind = _OutOfFuel if "fuel" in str(error.message) else _QuickFault
        raise kind(str(error.message)) from error
    except BaseException as error:
        # The error comes from our filters, or is a panic of the library, as for [][::-1]. A panic derives from
        # BaseException, so no `except Exception` would catch it.
        if not isinstance(error, Exception) and type(error).__module__ != "pyo3_runtime":
            raise
        raise _QuickFault(str(error)) from error


def _name(conversation: Conversation) -> str:
    return "tool_use" if conversation.tools else "chat"


class ChatTemplate:
    """A compiled template. `special_tokens` are bos_token, eos_token and so on, as text."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        tool_source: str | None = None,
        seal: SpecialTokenGuard | None = None,
    ) -> None:
        """`tool_source`: the template for conversations with tools, if there is another.

        `seal`: the guard of special tokens.
        """
        self._opened = seal.unescape if seal else str
        if seal:
            source, tool_source = seal.escape(source), seal.escape(tool_source or "")
            special_tokens = {name: seal.escape(token) for name, token in special_tokens.items()}
        self.all_sources = f"{source}\n{tool_source}" if tool_source else source
        sources = {"chat": source, "tool_use": tool_source or source}
        self._histories = {name: HistoryRewriter(partial(self._sample, name)) for name in sources}
        self._knows_developers = "developer" in self.all_sources
        self._asks_for_none = IS_NONE.search(self.all_sources) is not None
        self._special_tokens = dict(special_tokens)
        sources = {name: TRAINED.sub(r"{%\1 \2with \3%}", text) for name, text in sources.items()}
        try:
            self._references = {name: JinjaReference(text) for name, text in sources.items()}
        except TemplateFault as fault:
            raise BadCheckpoint(f"chat template does not compile: {self._opened(str(fault))}") from fault
        peculiar = any(each.peculiar for each in self._references.values())
        self._quick = None if peculiar else _quick_environment(sources)

    def render(self, conversation: Conversation, field: str = "messages") -> str:
        """Return the prompt, up to where the assistant's answer begins or continues.

        Raises InvalidRequest naming the field.
        """
        messages = [self._known(message) for message in conversation.messages]
        if not conversation.is_continued:
            return self._rendered(conversation, messages, field)
        last = {**messages[-1], "content": messages[-1]["content"] + HERE}
        text, mark, _ = self._rendered(conversation, [*messages[:-1], last], field).rpartition(HERE)
        if not mark:
            raise InvalidRequest("the chat template does not let this message be continued", field)
        return text

    def try_out(self, conversation: Conversation) -> str:
        """Return why the template cannot render this conversation, with the line; "" if it can.

        Runs at startup only. If minijinja and Jinja render the conversation differently, Jinja renders all later ones.
        """
        name, messages = _name(conversation), [self._known(message) for message in conversation.messages]
        context = self._context(conversation, messages)
        try:
            expected = self._references[name].render(context)
        except TemplateRefused:
            return ""
        except TemplateFault as fault:
            return self._opened(str(fault)) if self._is_at_fault(name, conversation) else ""
        try:
            is_same = self._quick is None or _render_quickly(self._quick, name, context) == expected
        except (_Refused, _QuickFault):
            is_same = False
        if not is_same:
            self._quick = None
        return ""

    def _rendered(self, conversation: Conversation, messages: list[dict[str, Any]], field: str) -> str:
        """Render the messages. They change only if the template rejects them or would drop text."""
        name = _name(conversation)
        histories = self._histories[name]
        whole = histories.without_losses(messages)
        try:
            return self._rendered_by(name, conversation, whole, field)
        except (InvalidRequest, ModelFailed) as error:
            if (taken := histories.acceptable(messages)) == whole:
                raise
            try:
                return self._rendered_by(name, conversation, taken, field)
            except (InvalidRequest, ModelFailed):
                raise error from None

    def _sample(self, name: str, messages: list[dict[str, Any]]) -> str:
        return self._rendered_by(name, Conversation(()), [self._known(message) for message in messages], "messages")

    def _rendered_by(self, name: str, conversation: Conversation, messages: list[dict[str, Any]], field: str) -> str:
        """Render by minijinja, or by Jinja if that fails or differs."""
        context = self._context(conversation, messages)
        try:
            if self._quick is not None:
                with suppress(_QuickFault):
                    return self._in_both_forms(partial(_render_quickly, self._quick, name), context)
            return self._in_both_forms(self._references[name].render, context)
        except (_Refused, TemplateRefused) as error:
            raise InvalidRequest(self._opened(str(error)), field) from error
        except (_OutOfFuel, TemplateFault) as error:
            said = self._opened(str(error))
            if isinstance(error, TemplateFault) and self._is_at_fault(name, conversation):
                raise ModelFailed(f"the chat template has a fault: {said}") from error
            raise InvalidRequest(f"the chat template cannot render these messages: {said}", field) from error

    def _in_both_forms(self, render: Callable[[dict[str, Any]], str], context: dict[str, Any]) -> str:
        """Render with arguments as objects, as most templates expect, then as text, as DeepSeek's do."""
        try:
            return render(context)
        except (_QuickFault, TemplateFault):
            messages = context["messages"]
            texts = [_with_texts({**message, "content": message["content"] or ""}) for message in messages]
            if texts != messages:
                with suppress(_Refused, TemplateRefused, _QuickFault, TemplateFault):
                    return render({**context, "messages": texts})
            raise

    def _is_at_fault(self, name: str, conversation: Conversation) -> bool:
        """True if the template also fails for a conversation of the same shape with "x" for every text."""
        context = self._context(conversation, [_simple(self._known(each)) for each in conversation.messages])
        context["tools"] = [_SIMPLE_TOOL] if conversation.tools else None
        try:
            self._in_both_forms(self._references[name].render, context)
        except TemplateRefused:
            return False
        except TemplateFault:
            return True
        return False

    def _context(self, conversation: Conversation, messages: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            **conversation.kwargs,
            **self._special_tokens,
            "messages": messages,
            "tools": list(conversation.tools) or None,
            "documents": None,  # transformers passes None, and templates test for it
            "add_generation_prompt": conversation.is_open and not conversation.is_continued,
        }

    def _known(self, message: dict[str, Any]) -> dict[str, Any]:
        """Adapt a message to the template; most templates reject the role `developer`, so it becomes `system`."""
        if message["role"] == "developer" and not self._knows_developers:
            return {**message, "role": "system"}
        if "tool_calls" in message:
            content = None if self._asks_for_none and message["content"] is None else message["content"] or ""
            return {**message, "content": content}
        return message


_SIMPLE_TOOL = {"type": "function", "function": {"name": "x", "description": "x", "parameters": {"type": "object"}}}


def _simple(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with every text and argument replaced by a harmless one."""
    simple = {**message, "content": "x" if isinstance(message["content"], str) else message["content"]}
    if "tool_calls" in message:
        simple["tool_calls"] = [
            {**call, "function": {**call["function"], "name": "x", "arguments": {}}} for call in message["tool_calls"]
        ]
    return simple


def _with_texts(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with its call arguments as JSON text."""
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
