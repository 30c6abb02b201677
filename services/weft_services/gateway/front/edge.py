"""What every HTTP exchange has: a request id in the header and in the log, a line in the access log, a key that is
checked before anything else is looked at, and the key's limits in the answer. Pure ASGI, around all of it."""

from __future__ import annotations

import re
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.errors import Forbidden, WeftError
from weft.ids import new_id
from weft.log import request_id
from weft_services.gateway.access.door import Door
from weft_services.gateway.access.visitor import Visitor, visitor
from weft_services.gateway.dialects.anthropic_frames import message_error
from weft_services.gateway.dialects.rate_headers import anthropic_headers, openai_headers
from weft_services.gateway.error_body import error_body
from weft_services.gateway.front.access_log import note, opened
from weft_services.gateway.front.exchange import Reply, header
from weft_services.gateway.front.paths import plain_path

MESSAGES = "/v1/messages"
API = ("/v1/", "/tokenize", "/detokenize")
# on paths that are not one API's alone, Anthropic's clients are known by the header that they always send
ANTHROPIC_VERSION = b"anthropic-version"
OPENAI = ("/v1/chat/", "/v1/completions", "/v1/embeddings", "/v1/responses", "/tokenize", "/detokenize")
# for whoever asks whether to send requests here
# the page is the same for everybody, and asks for the key itself
OPEN_PATHS = frozenset({"/health", "/ready", "/"})
PAGE_FILES = "/weft/page/"
# asked every few seconds by machines
PROBES, METRICS = ("/health", "/ready"), "/metrics"
# in the log, as nginx has it: who asked did not wait for an answer
CLIENT_LEFT = 499
ACCEPTABLE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}", re.ASCII)


class Exchanges:
    """x-request-id: the client's own where it is harmless, else a new one. Never used inside the mesh. Anthropic's
    clients look for it under a name of their own. And a line in the log when the exchange is over.

    Everything further in sees the path without the slashes that clients add to it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Wrap one exchange."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["path"] = plain_path(scope["path"])
        given = header(scope, b"x-request-id")
        chosen = given if ACCEPTABLE_ID.fullmatch(given) else new_id()
        request_id.set(chosen)
        fields = [(b"x-request-id", chosen.encode())]
        if is_anthropic(scope):
            fields.append((b"request-id", chosen.encode()))
        status = CLIENT_LEFT

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), *fields]
            await send(message)

        entry = opened(scope["method"], scope["path"])
        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            status = 500  # answered further out, or not at all where a stream had begun
            raise
        finally:
            if _is_worth_a_line(scope["path"], status):
                entry.write(status)


class Doorkeeper:
    """Every path needs a key: those of the API any, the rest an operator's. Decided on the path that is routed, never
    on a URL that was made of headers."""

    def __init__(self, app: ASGIApp, door: Door, is_served: Callable[[Scope], bool]) -> None:
        """`is_served`: an address that is not needs no operator to be reported as such."""
        self._app = app
        self._door = door
        self._is_served = is_served

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Wrap one exchange."""
        if scope["type"] != "http":
            return  # nothing else is served
        path: str = scope["path"]
        if path in OPEN_PATHS or path.startswith(PAGE_FILES):
            await self._app(scope, receive, send)
            return
        speaks_anthropic = is_anthropic(scope)
        try:
            found = self._door.enter(scope["headers"])
            if found.has_limits:
                send = _with_limits(send, found, speaks_anthropic)
            if not (path.startswith(API) or found.is_operator) and self._is_served(scope):
                raise Forbidden("this path is for an operator's key")
        except WeftError as error:
            await Reply(send, message_error if speaks_anthropic else error_body).fail(error)
            return
        visitor.set(found)
        note({"key": found.name})
        await self._app(scope, receive, send)


def _is_worth_a_line(path: str, status: int) -> bool:
    """Neither probes nor, as long as all is well, what is scraped and the page's own files."""
    if path in PROBES:
        return False
    return status >= 400 or not (path == METRICS or path.startswith(PAGE_FILES))


def is_anthropic(scope: Scope) -> bool:
    """Is the client answered in the form of Anthropic's API."""
    path: str = scope["path"]
    if path == MESSAGES or path.startswith(f"{MESSAGES}/"):
        return True
    return not path.startswith(OPENAI) and bool(header(scope, ANTHROPIC_VERSION))


def _with_limits(send: Send, found: Visitor, speaks_anthropic: bool) -> Send:
    """The limits as they are when the answer begins."""

    async def send_with_limits(message: Message) -> None:
        if message["type"] == "http.response.start":
            fields = anthropic_headers(found.levels()) if speaks_anthropic else openai_headers(found.levels())
            message["headers"] = [*message.get("headers", ()), *fields]
        await send(message)

    return send_with_limits
