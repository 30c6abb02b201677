"""Converts a WeftError to OpenAI's error body, HTTP status and retry headers. Internal details stay in the log."""

from __future__ import annotations

import math
from typing import Any

import orjson

from weft.errors import (
    DeadlineExceeded,
    EngineFailed,
    Forbidden,
    InvalidRequest,
    ModelFailed,
    ModelLoading,
    NotFound,
    Overloaded,
    PeerLost,
    RateLimited,
    SamplingChanged,
    Unauthenticated,
    WeftError,
    from_code,
)

RETRY_AFTER_SECONDS = 1.0
CODES: dict[type[WeftError], str] = {
    Unauthenticated: "invalid_api_key",
    Forbidden: "insufficient_permissions",
    Overloaded: "overloaded",
    ModelLoading: ModelLoading.reason,
    SamplingChanged: SamplingChanged.reason,
    PeerLost: "unavailable",
    ModelFailed: "model_failed",
    EngineFailed: "internal_error",
}


class HttpError(WeftError):
    """An error that exists in HTTP only, such as 413 or 415."""

    error_type = "invalid_request_error"

    def __init__(self, status: int, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


def public_message(error: WeftError) -> str:
    """Return the message that a client may see.

    Errors of a request pass through; messages from other services may contain addresses and do not.
    """
    if isinstance(error, ModelLoading):
        return "the model is being loaded; try again in a moment"
    if isinstance(error, SamplingChanged):
        return "the worker of this answer is lost, and the others would sample different tokens; send the request again"
    if isinstance(error, PeerLost):
        return "a service that this request needs is unavailable or was lost; try again"
    if error.is_remote and isinstance(error, Overloaded):
        return "no worker has capacity for this request now; try again later"
    if error.is_remote and isinstance(error, DeadlineExceeded):
        return "the request took too long"
    if isinstance(error, HttpError | ModelFailed) or error.http_status < 500 or error.code == 4:
        return str(error)
    return "internal error"


def public_error(error: WeftError) -> WeftError:
    """Return the same error class with its public message, for gRPC clients."""
    public = from_code(error.code, public_message(error))
    if isinstance(public, Overloaded) and isinstance(error, Overloaded):
        public.retry_after_seconds = error.retry_after_seconds
    if isinstance(public, InvalidRequest) and isinstance(error, InvalidRequest):
        public.param, public.reason = error.param, error.reason
    return public


def status_of(error: WeftError) -> int:
    """Return the HTTP status of an error."""
    return error.status if isinstance(error, HttpError) else error.http_status


def error_body(error: WeftError) -> bytes:
    """Return OpenAI's error body. It always has all four keys."""
    return orjson.dumps({"error": error_fields(error)})


def error_fields(error: WeftError) -> dict[str, Any]:
    """Return the inner object of an error body."""
    param: str | None = None
    code: str | None = None
    kind = error.error_type
    if isinstance(error, InvalidRequest):
        param, code = error.param, error.reason
    elif isinstance(error, NotFound):
        param, code = "model", "model_not_found"
    elif isinstance(error, HttpError):
        code = error.reason
    elif isinstance(error, RateLimited):
        kind, code = error.kind, "rate_limit_exceeded"
    else:
        code = next((code for leaf, code in CODES.items() if isinstance(error, leaf)), None)
    return {"message": public_message(error), "type": kind, "param": param, "code": code}


def retry_after_headers(error: WeftError) -> list[tuple[bytes, bytes]]:
    """Return the headers that tell a client when, or how, to retry. The time is never too early."""
    if isinstance(error, Unauthenticated):
        return [(b"www-authenticate", b"Bearer")]
    if isinstance(error, Overloaded):
        seconds = error.retry_after_seconds
    elif isinstance(error, PeerLost):
        seconds = RETRY_AFTER_SECONDS
    else:
        return []
    milliseconds = math.ceil(seconds * 1000)
    return [
        (b"retry-after", str(math.ceil(milliseconds / 1000)).encode()),
        (b"retry-after-ms", str(milliseconds).encode()),
    ]
