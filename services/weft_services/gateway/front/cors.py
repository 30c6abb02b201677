"""CORS: which pages of other origins may use the API from a browser.

Only the API answers them. The page, its files, the metrics and what operators do stay closed to other origins: without
keys a caller's place on this machine is all that makes it an operator, and a page in a browser there has that place.
"""

from __future__ import annotations

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from weft_services.gateway.access.limiter import KINDS
from weft_services.gateway.front.edge import API, PROBES
from weft_services.gateway.front.paths import meant_path

METHODS = ("GET", "HEAD", "POST", "DELETE", "OPTIONS")
PREFLIGHT_SECONDS = 600
_LIMITS = ("limit", "remaining", "reset")
# what scripts may read of an answer; browsers hide all others
EXPOSED = (
    *("x-request-id", "request-id", "retry-after", "retry-after-ms", "x-weft-timeline", "www-authenticate"),
    *(f"x-ratelimit-{name}-{kind}" for kind in KINDS for name in _LIMITS),
    *(f"anthropic-ratelimit-{kind}-{name}" for kind in KINDS for name in _LIMITS),
)


class Cors:
    """Around the whole application, so that errors of every layer carry the headers, and preflights need no key.

    Credentials are not allowed: keys come in headers that a script sets itself, never in cookies.
    """

    def __init__(self, app: ASGIApp, origins: tuple[str, ...]) -> None:
        """`origins`: as browsers write them; `*` lets all of them in."""
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
        """One exchange."""
        app = self._open if scope["type"] == "http" and _is_for_pages(scope["path"]) else self._closed
        await app(scope, receive, send)


def _is_for_pages(path: str) -> bool:
    """An address that was meant for the API tells its page so."""
    return path.startswith(API) or path in PROBES or (meant_path(path) or "").startswith(API)
