"""The exception tree. Each leaf owns its gRPC code, its HTTP status and its OpenAI error type.

WeftError
  InvalidRequest     the caller must change the request; `param` names the field
  Unauthenticated    the API key is missing or unknown
  Forbidden          the API key may not do this
  NotFound           no such model, lease or file
  BadCheckpoint      a model directory is incomplete or damaged; the message names file or tensor
  StorageUnavailable  storage failed for now; a retry may succeed
  Incompatible       two peers do not run the same model, layout or boot
  Overloaded         no capacity now; retry after `retry_after_seconds`
    QueueFull        the queue is full; similar requests fail for `hold_seconds`
    RateLimited      the caller exceeded its limit; `kind` names it
  PeerLost           another service is gone, silent or broke the protocol; `worker_id` names it
    NoWorker         no worker takes the request now; a retry may find one
      ModelLoading   no worker serves the model yet; one is loading it
      SamplingChanged  the workers sample other tokens than the one that began the answer
  DeadlineExceeded   the caller's deadline has passed
  Cancelled          the caller left
  ModelFailed        the model's files are at fault: its template, or weights with NaN logits
  EngineFailed       a bug or a broken device

ConfigError and BindError end a process at its start and never reach a client.
"""

from __future__ import annotations

from typing import ClassVar


class WeftError(Exception):
    """Base of all exceptions that Weft raises on purpose. `code` is a google.rpc.Code number."""

    code: ClassVar[int] = 13
    http_status: ClassVar[int] = 500
    error_type: ClassVar[str] = "server_error"
    # The message came from another service and may contain internal addresses; do not show it to clients.
    is_remote = False


class ConfigError(Exception):
    """An unusable setting; the message names the variable."""


class BindError(OSError):
    """The port is taken, or the host is not this machine's; the message names both. A later start may succeed."""


class InvalidRequest(WeftError):
    """The request is wrong; `param` is the path of the field at fault, e.g. `messages.0.role`."""

    code = 3
    http_status = 400
    error_type = "invalid_request_error"

    def __init__(self, message: str, param: str | None = None, reason: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.reason = reason  # OpenAI's `code`, e.g. context_length_exceeded


class Unauthenticated(WeftError):
    """The API key is missing or unknown. The message never repeats the key."""

    code = 16
    http_status = 401
    error_type = "invalid_request_error"


class Forbidden(WeftError):
    """The API key is known but may not do this."""

    code = 7
    http_status = 403
    error_type = "invalid_request_error"


class NotFound(WeftError):
    """The named model, lease or file does not exist here."""

    code = 5
    http_status = 404
    error_type = "invalid_request_error"


class BadCheckpoint(WeftError):
    """The checkpoint is incomplete, damaged or unsupported."""

    code = 9


class StorageUnavailable(WeftError):
    """A disk or object store fails at the moment; that says nothing about the stored data."""

    code = 14
    http_status = 503


class Incompatible(WeftError):
    """Two peers differ in model, layout or boot and must not exchange blocks."""

    code = 9


class Overloaded(WeftError):
    """No capacity now; nothing has started."""

    code = 8
    http_status = 429
    error_type = "rate_limit_error"

    def __init__(self, message: str, retry_after_seconds: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class QueueFull(Overloaded):
    """The queue is full. For `hold_seconds` it also rejects every request of this model, tenant and priority that needs
    as much room or more.
    """

    def __init__(self, message: str, retry_after_seconds: float, hold_seconds: float) -> None:
        super().__init__(message, retry_after_seconds)
        self.hold_seconds = hold_seconds


class RateLimited(Overloaded):
    """The API key exceeded its limit; `kind` is "requests" or "tokens"."""

    def __init__(self, message: str, retry_after_seconds: float, kind: str) -> None:
        super().__init__(message, retry_after_seconds)
        self.kind = kind


class PeerLost(WeftError):
    """A service that this request needs is gone, silent or broke the protocol."""

    code = 14
    http_status = 503

    def __init__(self, message: str, worker_id: str = "") -> None:
        super().__init__(message)
        self.worker_id = worker_id


class NoWorker(PeerLost):
    """No worker takes the request now; nothing was reserved, and a retry may find a worker."""

    reason: ClassVar[str] = "no_worker"


class ModelLoading(NoWorker):
    """No worker serves the model yet, but at least one is loading it."""

    reason: ClassVar[str] = "model_loading"


class SamplingChanged(NoWorker):
    """All live workers have another sampling version than the one that began the answer; an older one may return."""

    reason: ClassVar[str] = "sampling_changed"


class DeadlineExceeded(WeftError):
    """The deadline of the request has passed."""

    code = 4
    http_status = 504
    error_type = "timeout_error"


class Cancelled(WeftError):
    """The caller left; no client reads this error."""

    code = 1
    http_status = 499


class ModelFailed(WeftError):
    """The model's files cannot answer this request; clients may see the message."""

    code = 15


class EngineFailed(WeftError):
    """A bug or a broken device; the message is for the log, not for clients."""


LEAVES: tuple[type[WeftError], ...] = (
    InvalidRequest,
    Unauthenticated,
    Forbidden,
    NotFound,
    BadCheckpoint,
    Overloaded,
    PeerLost,
    DeadlineExceeded,
    Cancelled,
    ModelFailed,
    EngineFailed,
)


def from_code(code: int, message: str) -> WeftError:
    """Return the exception for a peer's status code. Unknown codes become EngineFailed."""
    leaf = next((leaf for leaf in LEAVES if leaf.code == code), EngineFailed)
    error = leaf(message)
    error.is_remote = True
    return error
