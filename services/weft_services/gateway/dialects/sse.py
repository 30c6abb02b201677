"""Server-sent events: frames that several APIs share, and padding that hides token lengths."""

from __future__ import annotations

import secrets
from typing import Any

import orjson

from weft.errors import WeftError
from weft_services.gateway.error_body import error_body

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
# Padded events have a multiple of this length.
GRAIN_BYTES = 64
_BARE = len(b',"obfuscation":""')


def error_frame(error: WeftError) -> bytes:
    """Encode OpenAI's error frame for a stream that has begun."""
    return b"data: " + error_body(error) + b"\n\n" + DONE


def event(kind: str, **fields: Any) -> bytes:
    """Encode an event with its type as name."""
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **fields}) + b"\n\n"


def with_obfuscation(event: bytes) -> bytes:
    """Add a field of random letters to an event that ends with an object and an empty line.

    Lengths of encrypted packets reveal token lengths and thereby much of the text (arXiv 2511.03675).
    """
    missing = -(len(event) + _BARE) % GRAIN_BYTES
    letters = secrets.token_hex(GRAIN_BYTES // 2)[:missing].encode()
    return event.removesuffix(b"}\n\n") + b',"obfuscation":"' + letters + b'"}\n\n'
