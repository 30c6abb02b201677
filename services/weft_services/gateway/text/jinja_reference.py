"""Renders chat templates with Jinja in a sandbox, with the settings of transformers; minijinja is the fast path.

The sandbox limits what a template can reach. Limits on loop iterations and products bound its cost.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

# A 4096-message conversation takes a few iterations per message; an empty loop of 300,000 takes about 30 ms.
MAX_TURNS = 300_000
MAX_PRODUCT = 10_000_000
FILE_NAME = "<chat template>"
# Constructs that minijinja renders differently without an error.
OTHER_FILTERS = frozenset({"attr", "pprint", "urlencode"})
OTHER_TESTS = frozenset({"callable", "float"})
OTHER_NAMES = frozenset({"self", "debug"})
_turns_left: ContextVar[list[int]] = ContextVar("turns_left")


class TemplateRefused(jinja2.TemplateError):
    """The template rejected the conversation by calling raise_exception."""


class TemplateFault(Exception):
    """The template cannot be compiled or rendered; the message names the line and the construct."""


class JinjaReference:
    """A compiled template. Threads may render concurrently."""

    def __init__(self, source: str) -> None:
        self._template, self.peculiar = _compiled(source)

    def render(self, context: Mapping[str, Any]) -> str:
        """Render the template. Raises TemplateRefused, TemplateFault."""
        _turns_left.set([MAX_TURNS])
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
    left = _turns_left.get()
    for item in items:
        left[0] -= 1
        if left[0] < 0:
            raise SecurityError(f"more than {MAX_TURNS} loop iterations")
        yield item


def _refuse(message: str) -> None:
    raise TemplateRefused(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)  # local time, as transformers passes it to templates


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
