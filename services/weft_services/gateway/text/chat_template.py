"""Renders conversations with the model's chat template, by minijinja with fuel and the settings of transformers.

Where minijinja fails or differs, Jinja renders instead, in a sandbox that limits what a template can reach; limits on
loop iterations and products bound its cost. The template comes from the model directory, never from a request.
"""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache, partial
from typing import Any

import jinja2
import minijinja
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from weft.errors import BadCheckpoint, InvalidRequest, ModelFailed
from weft_services.gateway.generation import Conversation
from weft_services.gateway.text.history_rewrite import NeededRewrites, find_needed_rewrites, rewritten
from weft_services.gateway.text.special_tokens import SpecialTokenGuard

# A 4096-message conversation needs less than a tenth of this; an endless loop ends after about 100 ms.
FUEL = 10_000_000
# Marks where a continued answer goes on; from Unicode's private use area.
HERE = "\ue0fe"
# Templates that recognize a message with calls by its missing content.
IS_NONE = re.compile(r"content['\"]?\]?\s+is\s+(not\s+)?none", re.IGNORECASE)
# Transformers' tag around trained text. `with` opens the same scope and renders the same.
TRAINED = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")


class TemplateRefused(jinja2.TemplateError):
    """The template rejected the conversation by calling raise_exception."""


class TemplateFault(Exception):
    """The template cannot be compiled or rendered; the message names the line and the construct."""


class _QuickFault(Exception):
    """minijinja cannot render the template; Jinja may."""


class _OutOfFuel(Exception):
    """The template took too many steps."""


def _refuse(message: str) -> None:
    raise TemplateRefused(message)


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
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


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
    except TemplateRefused:
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


# A 4096-message conversation takes a few iterations per message; an empty loop of 300,000 takes about 30 ms.
MAX_ITERATIONS = 300_000
MAX_PRODUCT = 10_000_000
FILE_NAME = "<chat template>"
# Constructs that minijinja renders differently without an error.
OTHER_FILTERS = frozenset({"attr", "pprint", "urlencode"})
OTHER_TESTS = frozenset({"callable", "float"})
OTHER_NAMES = frozenset({"self", "debug"})
_iterations_left: ContextVar[list[int]] = ContextVar("iterations_left")


class JinjaReference:
    """A compiled template. Threads may render concurrently."""

    def __init__(self, source: str) -> None:
        self._template, self.peculiar = _compiled(source)

    def render(self, context: Mapping[str, Any]) -> str:
        """Render the template. Raises TemplateRefused, TemplateFault."""
        _iterations_left.set([MAX_ITERATIONS])
        try:
            return self._template.render(dict(context))
        except TemplateRefused:
            raise
        except Exception as error:
            raise TemplateFault(f"{_line_of(error)}{error or type(error).__name__}") from error


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        counts = [each if isinstance(each, int | float) else len(each) for each in (left, right)]
        largest = abs(right) * 4 if operator == "**" and isinstance(right, int | float) else abs(counts[0] * counts[1])
        if largest > MAX_PRODUCT and not all(isinstance(each, float) for each in (left, right)):
            raise SecurityError(f"{operator}: the result is too large")
        return super().call_binop(context, operator, left, right)


def _environment() -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters |= {"tojson": _to_json, "counted": _counted}
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    return environment


@lru_cache(maxsize=64)
def _compiled(source: str) -> tuple[jinja2.Template, str]:
    """Return the template, and the first construct in it that minijinja renders differently."""
    environment = _environment()
    try:
        tree = environment.parse(source, filename=FILE_NAME)
        peculiar = next(_peculiar(tree), "")
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, "counted", [], [], None, None, lineno=loop.lineno)
        code = environment.compile(tree, filename=FILE_NAME)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateFault(f"line {error.lineno}: {error.message}") from error
    except RecursionError as error:
        raise TemplateFault("nested too deeply") from error
    return environment.template_class.from_code(environment, code, environment.make_globals(None)), peculiar


def _peculiar(tree: nodes.Template) -> Iterator[str]:
    for node in tree.find_all((nodes.Filter, nodes.Test, nodes.Name, nodes.Const, nodes.Macro)):
        match node:
            case nodes.Filter(name=name) if name in OTHER_FILTERS:
                yield f"line {node.lineno}: {name}"
            case nodes.Test(name=name) if name in OTHER_TESTS:
                yield f"line {node.lineno}: is {name}"
            case nodes.Name(name=name) if name in OTHER_NAMES:
                yield f"line {node.lineno}: {name}"
            case nodes.Const(value=float() as value):
                yield f"line {node.lineno}: {value}"
            case nodes.Macro(defaults=defaults) if any(each.find(nodes.Name) for each in _groups(defaults)):
                yield f"line {node.lineno}: defaults of {node.name}"


def _groups(defaults: list[nodes.Expr]) -> list[nodes.Node]:
    """Wrap nodes, because `find` searches below a node and skips the node itself."""
    return [nodes.List(defaults)]


def _line_of(error: Exception) -> str:
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == FILE_NAME]
    return f"line {lines[-1]}: " if lines else ""


def _counted(items: Any) -> Iterator[Any]:
    left = _iterations_left.get()
    for item in items:
        left[0] -= 1
        if left[0] < 0:
            raise SecurityError(f"more than {MAX_ITERATIONS} loop iterations")
        yield item


def _name(conversation: Conversation) -> str:
    return "tool_use" if conversation.tools else "chat"


class ChatTemplate:
    """A compiled template. `special_tokens` are bos_token, eos_token and so on, as text."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        tool_source: str | None = None,
        guard: SpecialTokenGuard | None = None,
    ) -> None:
        """`tool_source`: the template for conversations with tools, if there is another.

        `guard`: keeps special tokens in messages from being read as such.
        """
        self._unescape = guard.unescape if guard else str
        if guard:
            source, tool_source = guard.escape(source), guard.escape(tool_source or "")
            special_tokens = {name: guard.escape(token) for name, token in special_tokens.items()}
        self.all_sources = f"{source}\n{tool_source}" if tool_source else source
        sources = {"chat": source, "tool_use": tool_source or source}
        self._rewrites: dict[str, NeededRewrites] = {}  # found at the first rendering of each template
        self._knows_developers = "developer" in self.all_sources
        self._asks_for_none = IS_NONE.search(self.all_sources) is not None
        self._special_tokens = dict(special_tokens)
        sources = {name: TRAINED.sub(r"{%\1 \2with \3%}", text) for name, text in sources.items()}
        try:
            self._references = {name: JinjaReference(text) for name, text in sources.items()}
        except TemplateFault as fault:
            raise BadCheckpoint(f"chat template does not compile: {self._unescape(str(fault))}") from fault
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
            return self._unescape(str(fault)) if self._is_at_fault(name, conversation) else ""
        try:
            is_same = self._quick is None or _render_quickly(self._quick, name, context) == expected
        except (TemplateRefused, _QuickFault):
            is_same = False
        if not is_same:
            self._quick = None
        return ""

    def _rendered(self, conversation: Conversation, messages: list[dict[str, Any]], field: str) -> str:
        """Render the messages. They change only if the template rejects them or would drop text."""
        name = _name(conversation)
        if (rewrites := self._rewrites.get(name)) is None:
            rewrites = self._rewrites[name] = find_needed_rewrites(partial(self._sample, name))
        if rewrites.against_losses:
            with suppress(InvalidRequest, ModelFailed):
                text = self._rendered_by(name, conversation, messages, field)
                if rewrites.are_spared(messages, text):
                    return text
        whole = rewritten(messages, rewrites.against_losses) if rewrites.against_losses else messages
        try:
            return self._rendered_by(name, conversation, whole, field)
        except (InvalidRequest, ModelFailed) as error:
            if (taken := rewritten(messages, rewrites.against_refusals)) == whole:
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
        except TemplateRefused as error:
            raise InvalidRequest(self._unescape(str(error)), field) from error
        except (_OutOfFuel, TemplateFault) as error:
            said = self._unescape(str(error))
            if isinstance(error, TemplateFault) and self._is_at_fault(name, conversation):
                raise ModelFailed(f"the chat template has a fault: {said}") from error
            raise InvalidRequest(f"the chat template cannot render these messages: {said}", field) from error

    def _in_both_forms(self, render: Callable[[dict[str, Any]], str], context: dict[str, Any]) -> str:
        """Render with arguments as objects, as most templates expect, then as text, as DeepSeek's do."""
        try:
            return render(context)
        except (_QuickFault, TemplateFault):
            messages = context["messages"]
            texts = [_with_texts(message) for message in messages]
            for each in (texts, [{**message, "content": message["content"] or ""} for message in texts]):
                if each != messages:
                    with suppress(TemplateRefused, _QuickFault, TemplateFault):
                        return render({**context, "messages": each})
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
        if "thinking" in self.all_sources and message.get("reasoning_content"):
            message = {"thinking": message["reasoning_content"], **message}  # as transformers does since 5.0
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
