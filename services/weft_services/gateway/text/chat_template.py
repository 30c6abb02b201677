"""Renders conversations with the model's own chat template: minijinja with fuel, set up as transformers sets up Jinja.

The template comes from the model directory only, never from a request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import minijinja

from weft.errors import BadCheckpoint, InvalidRequest
from weft_services.gateway.generation import Conversation

# A 4096-message conversation needs well under a tenth of this; a loop bomb is stopped after some 100 ms.
FUEL = 10_000_000


class _Refused(Exception):
    """The template itself called raise_exception."""


def _refuse(message: str) -> None:
    raise _Refused(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(form: str) -> str:
    return datetime.now().strftime(form)  # local time, as transformers gives templates


class ChatTemplate:
    """One compiled template. `special_tokens` are bos_token, eos_token and the like, as text."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._knows_developers = "developer" in source
        self._special_tokens = dict(special_tokens)
        self._environment = minijinja.Environment(
            fuel=FUEL, debug=False, trim_blocks=True, lstrip_blocks=True, pycompat=True
        )
        self._environment.add_filter("tojson", _to_json)
        self._environment.add_global("raise_exception", _refuse)
        self._environment.add_global("strftime_now", _now)
        try:
            self._environment.add_template("chat", source)
        except minijinja.TemplateError as error:
            raise BadCheckpoint(f"chat template does not compile: {error.message}") from error

    def render(self, conversation: Conversation, field: str = "messages") -> str:
        """The prompt text, up to where the assistant begins to speak. Raises InvalidRequest naming the field."""
        try:
            return self._environment.render_template(
                "chat",
                messages=[self._known(message) for message in conversation.messages],
                tools=list(conversation.tools) or None,
                add_generation_prompt=conversation.is_open,
                **{**conversation.kwargs, **self._special_tokens},
            )
        except _Refused as error:
            raise InvalidRequest(str(error), field) from error
        except minijinja.TemplateError as error:
            raise InvalidRequest(f"the chat template cannot render these messages: {error.kind}", field) from error

    def _known(self, message: dict[str, Any]) -> dict[str, Any]:
        """Templates drop, or refuse, roles that they do not know: to most of them a developer is the system."""
        if message["role"] == "developer" and not self._knows_developers:
            return {**message, "role": "system"}
        return message
