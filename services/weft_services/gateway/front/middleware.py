"""Pure ASGI middleware around every HTTP request: request id, access log, authentication, rate-limit headers, CORS."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.errors import Forbidden, WeftError
from weft.log import request_id
from weft.request import new_id
from weft_services.gateway.access.authentication import Authenticator, Principal, current_principal
from weft_services.gateway.access.limiter import KINDS, RateLimitState
from weft_services.gateway.front.asgi_io import (
    API,
    METRICS,
    OPEN_PATHS,
    PAGE_FILES,
    PROBES,
    ResponseWriter,
    header,
    is_anthropic,
    normalized_path,
    suggested_path,
)
from weft_services.gateway.front.request_record import note, open_entry

# Status in the log of a client that left before its answer, as in nginx.
CLIENT_LEFT = 499
ACCEPTABLE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}", re.ASCII)
METHODS = ("GET", "HEAD", "POST", "DELETE", "OPTIONS")
PREFLIGHT_SECONDS = 600
_LIMITS = ("limit", "remaining", "reset")
# Response headers that scripts may read; browsers hide all others.
EXPOSED = (
    *("x-request-id", "request-id", "retry-after", "retry-after-ms", "x-weft-timeline", "www-authenticate"),
    *(f"x-ratelimit-{name}-{kind}" for kind in KINDS for name in _LIMITS),
    *(f"anthropic-ratelimit-{kind}-{name}" for kind in KINDS for name in _LIMITS),
)
Headers = list[tuple[bytes, bytes]]


class RequestIdMiddleware:
    """Sets x-request-id, normalizes the path and writes the access-log line.

    The client's own id is used if it is harmless, and never inside the mesh. Anthropic's clients get it as request-id
    too.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["path"] = normalized_path(scope["path"])
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

        entry = open_entry(scope["method"], scope["path"])
        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            status = 500  # an outer layer answers; a stream that has begun just ends
            raise
        finally:
            if _is_logged(scope["path"], status):
                entry.write(status)


class AuthMiddleware:
    """Checks the key of every path: API paths accept any key, other paths only an operator's.

    It decides on the routed path, never on a URL built from headers.
    """

    def __init__(self, app: ASGIApp, authenticator: Authenticator, is_served: Callable[[Scope], bool]) -> None:
        """`is_served`: unknown addresses skip the operator check, so that they are reported as such."""
        self._app = app
        self._authenticator = authenticator
        self._is_served = is_served

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # the gateway serves only HTTP
        path: str = scope["path"]
        if path in OPEN_PATHS or path.startswith(PAGE_FILES):
            await self._app(scope, receive, send)
            return
        try:
            principal = self._authenticator.authenticate(scope["headers"])
            if principal.has_limits:
                send = _with_limits(send, principal, is_anthropic(scope))
            if not (path.startswith(API) or principal.is_operator) and self._is_served(scope):
                raise Forbidden("this path needs an operator's key")
        except WeftError as error:
            await ResponseWriter(scope, send).fail(error)
            return
        current_principal.set(principal)
        note({"key": principal.name})
        await self._app(scope, receive, send)


def _is_logged(path: str, status: int) -> bool:
    """False for probes, and for successful scrapes and page files."""
    if path in PROBES:
        return False
    return status >= 400 or not (path == METRICS or path.startswith(PAGE_FILES))


def _with_limits(send: Send, principal: Principal, is_anthropic_client: bool) -> Send:
    """Add the limits as they are when the response begins."""

    async def send_with_limits(message: Message) -> None:
        if message["type"] == "http.response.start":
            fields = (
                anthropic_headers(principal.levels()) if is_anthropic_client else openai_headers(principal.levels())
            )
            message["headers"] = [*message.get("headers", ()), *fields]
        await send(message)

    return send_with_limits


class CorsMiddleware:
    """Lets pages of other origins use the API from a browser.

    Wraps the whole application, so that errors of every layer carry the headers and preflights need no key. Only the
    API allows other origins. The page, its files, metrics and operator endpoints do not: without keys, loopback makes a
    caller an operator, and any page in a local browser calls from loopback. Credentials are not allowed: scripts send
    keys in headers, never in cookies.
    """

    def __init__(self, app: ASGIApp, origins: tuple[str, ...]) -> None:
        """`origins`: as browsers send them; `*` allows all."""
        self._closed = app
        self._open = CORSMiddleware(
            app,
            allow_origins=origins,
            allow_methods=METHODS,
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=EXPOSED,
            max_age=PREFLIGHT_SECONDS,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._open if scope["type"] == "http" and _allows_cors(scope["path"]) else self._closed
        await app(scope, receive, send)


def _allows_cors(path: str) -> bool:
    """True for API paths and probes, and for mistyped API paths, so that the page can read the 404."""
    return path.startswith(API) or path in PROBES or (suggested_path(path) or "").startswith(API)


class FastRoutes:
    """Sends POST requests directly to endpoints that report all errors themselves.

    This skips Starlette's router and error handling on the hot path.
    """

    def __init__(self, app: ASGIApp, endpoints: Mapping[str, ASGIApp]) -> None:
        """`endpoints`: handlers of POST requests by path."""
        self._app = app
        self._endpoints = endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get(scope["path"]) if scope["method"] == "POST" else None
        await (endpoint or self._app)(scope, receive, send)


def openai_headers(levels: Sequence[RateLimitState]) -> Headers:
    """Return headers such as x-ratelimit-limit-requests. The reset time is a duration."""
    fields = []
    for level in levels:
        values = {"limit": str(level.limit), "remaining": str(level.remaining), "reset": duration(level.seconds)}
        fields += [(f"x-ratelimit-{name}-{level.kind}".encode(), value.encode()) for name, value in values.items()]
    return fields


def anthropic_headers(levels: Sequence[RateLimitState], now: datetime | None = None) -> Headers:
    """Return headers such as anthropic-ratelimit-requests-limit. The reset time is a timestamp."""
    fields = []
    for level in levels:
        reset = (now or datetime.now(UTC)) + timedelta(seconds=level.seconds)
        values = {
            "limit": str(level.limit),
            "remaining": str(level.remaining),
            "reset": reset.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        fields += [
            (f"anthropic-ratelimit-{level.kind}-{name}".encode(), value.encode()) for name, value in values.items()
        ]
    return fields


def duration(seconds: float) -> str:
    """Format a duration as Go does: 12ms, 8.64s, 1m26.4s, 6m0s."""
    milliseconds = round(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes}m{rest / 1000:g}s" if minutes else f"{rest / 1000:g}s"
