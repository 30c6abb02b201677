"""Addresses as clients write them: spellings that mean the same path, and the address meant by one that is not served.

Pure functions.
"""

from __future__ import annotations

import re

_SLASHES = re.compile(r"/{2,}")
BASE = "/v1"
# below the base of the API, and beside it
_ENDPOINTS = (
    *("/chat/completions", "/completions", "/embeddings", "/messages", "/messages/count_tokens", "/models"),
    *("/responses", "/responses/input_tokens"),
)
_BESIDE = ("/tokenize", "/detokenize", "/health", "/ready")
# endpoints of other servers, and the one that does the same here
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


def plain_path(path: str) -> str:
    """The path without empty segments and without a slash at its end, as clients add them to their base URL."""
    if "//" in path:
        path = _SLASHES.sub("/", path)
    return path.rstrip("/") or "/"


def meant_path(path: str) -> str | None:
    """The address that the client of an unserved path meant: its base URL has too much or too little, or it speaks
    another server's API. None where there is no such address, or it is the path itself."""
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
