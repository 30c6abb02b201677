"""Request paths: their spellings, the API that each belongs to, and suggestions for unknown ones."""

from __future__ import annotations

import re

from starlette.types import Scope

_SLASHES = re.compile(r"/{2,}")
BASE = "/v1"
# Endpoints below the API's base, and outside it.
_ENDPOINTS = (
    *("/chat/completions", "/completions", "/embeddings", "/messages", "/messages/count_tokens", "/models"),
    *("/responses", "/responses/input_tokens"),
)
_BESIDE = ("/tokenize", "/detokenize", "/health", "/ready")
# Endpoints of other servers, and our equivalents.
_ELSEWHERE = {
    "/api/chat": "/v1/chat/completions",
    "/api/embed": "/v1/embeddings",
    "/api/generate": "/v1/completions",
    "/api/show": "/v1/models",
    "/api/tags": "/v1/models",
    "/completion": "/v1/completions",
    "/generate": "/v1/completions",
    "/generate_stream": "/v1/completions",
}
_MODEL = re.compile(r".*/models/(?P<name>.+)")
_RESPONSE = re.compile(r".*/responses/(?P<rest>resp_\w+(/input_items)?)", re.ASCII)
MESSAGES = "/v1/messages"
API = ("/v1/", "/tokenize", "/detokenize")
# Anthropic's clients always send this header. It decides on paths that several APIs share.
ANTHROPIC_VERSION = b"anthropic-version"
OPENAI = ("/v1/chat/", "/v1/completions", "/v1/embeddings", "/v1/responses", "/tokenize", "/detokenize")
# Paths that need no key: probes, and the page, which asks for the key itself.
OPEN_PATHS = frozenset({"/health", "/ready", "/"})
PAGE_FILES = "/weft/page/"
# Monitoring polls these every few seconds.
PROBES, METRICS = ("/health", "/ready"), "/metrics"


def normalized_path(path: str) -> str:
    """Return the path without empty segments and trailing slash, which clients add through their base URL."""
    if "//" in path:
        path = _SLASHES.sub("/", path)
    return path.rstrip("/") or "/"


def suggested_path(path: str) -> str | None:
    """Return the address that an unknown path probably means, or None.

    The client's base URL may be too long or too short, or the path may be another server's.
    """
    meant = _ELSEWHERE.get(path) or _by_its_end(path)
    return None if meant == path else meant


def _by_its_end(path: str) -> str | None:
    ends = [(end, BASE + end) for end in _ENDPOINTS] + [(end, end) for end in _BESIDE]
    if fitting := [pair for pair in ends if path.endswith(pair[0])]:
        return max(fitting, key=lambda pair: len(pair[0]))[1]
    if (found := _RESPONSE.fullmatch(path)) is not None:
        return f"{BASE}/responses/{found['rest']}"
    if (found := _MODEL.fullmatch(path)) is not None:
        return f"{BASE}/models/{found['name']}"
    return f"{BASE}/models" if path.endswith(BASE) else None


def is_anthropic(scope: Scope) -> bool:
    """Return whether the request addresses Anthropic's API, so that its answers and errors use that format."""
    path: str = scope["path"]
    if path == MESSAGES or path.startswith(f"{MESSAGES}/"):
        return True
    has_version = any(name == ANTHROPIC_VERSION and value for name, value in scope["headers"])
    return has_version and not path.startswith(OPENAI)
