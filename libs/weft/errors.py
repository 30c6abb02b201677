"""The exception tree. Each leaf owns its gRPC code, its HTTP status and its OpenAI error type.

WeftError
  InvalidRequest     the caller must change the request; `param` names the field
  Unauthenticated    no API key, or none that is known
  Forbidden          the API key may not do this
  NotFound           no such model, lease or file
  BadCheckpoint      a model directory is incomplete or damaged; the message names file or tensor
  Unreadable         storage did not answer, or not well: the same may work later
  Incompatible       two peers do not run the same model, layout or boot
  Overloaded         no room now, try later; `retry_after_seconds`
    RoomClosed       so many wait that others like it need not ask for `hold_seconds`
    RateLimited      this caller has had its share; `kind` says of what
  PeerLost           another service is gone, silent or broke its word; `worker_id` names it
    NoWorker         no worker takes the request now; one may be back in a moment
      ModelLoading   no worker yet: one is loading the model
  DeadlineExceeded   the time the caller gave is over
  Cancelled          the caller has gone
  ModelFailed        the model's own files are at fault: its template, or weights whose logits are no numbers
  EngineFailed       our own fault
"""

from __future__ import annotations

from typing import ClassVar


class WeftError(Exception):
    """Base of everything Weft raises on purpose. `code` is a google.rpc.Code number."""

    code: ClassVar[int] = 13
    http_status: ClassVar[int] = 500
    error_type: ClassVar[str] = "server_error"
    # said by another service, in words that are for logs: they may name workers and addresses
    is_reported = False


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
    """Nobody we know. The message never repeats what was shown."""

    code = 16
    http_status = 401
    error_type = "invalid_request_error"


class Forbidden(WeftError):
    """Known, and not allowed."""

    code = 7
    http_status = 403
    error_type = "invalid_request_error"


class NotFound(WeftError):
    """No such thing here."""

    code = 5
    http_status = 404
    error_type = "invalid_request_error"


class BadCheckpoint(WeftError):
    """A checkpoint that cannot be served."""

    code = 9


class Unreadable(WeftError):
    """A disk or an object store that fails at the moment; says nothing of what is stored there."""

    code = 14
    http_status = 503


class Incompatible(WeftError):
    """Peers that must not exchange blocks."""

    code = 9


class Overloaded(WeftError):
    """Full; nothing was begun."""

    code = 8
    http_status = 429
    error_type = "rate_limit_error"

    def __init__(self, message: str, retry_after_seconds: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class RoomClosed(Overloaded):
    """So many wait that for `hold_seconds` no other of this model, tenant and priority that asks for as much, or for
    more, would be let in either."""

    def __init__(self, message: str, retry_after_seconds: float, hold_seconds: float) -> None:
        super().__init__(message, retry_after_seconds)
        self.hold_seconds = hold_seconds


class RateLimited(Overloaded):
    """More than the key's limit; `kind` is what there was too much of, requests or tokens."""

    def __init__(self, message: str, retry_after_seconds: float, kind: str) -> None:
        super().__init__(message, retry_after_seconds)
        self.kind = kind


class PeerLost(WeftError):
    """A service this request needs is gone."""

    code = 14
    http_status = 503

    def __init__(self, message: str, worker_id: str = "") -> None:
        super().__init__(message)
        self.worker_id = worker_id


class NoWorker(PeerLost):
    """No worker takes the request now. One that left may be back in a moment; nothing was booked."""

    reason: ClassVar[str] = "no_worker"


class ModelLoading(NoWorker):
    """No worker serves the model yet, and one at least is loading it."""

    reason: ClassVar[str] = "model_loading"


class DeadlineExceeded(WeftError):
    """Too late."""

    code = 4
    http_status = 504
    error_type = "timeout_error"


class Cancelled(WeftError):
    """The caller has left; nobody reads this."""

    code = 1
    http_status = 499


class ModelFailed(WeftError):
    """The model's files cannot answer this request; the message is for clients, too."""

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
    """The leaf that a peer's status stands for; unknown codes are the peer's own fault."""
    leaf = next((leaf for leaf in LEAVES if leaf.code == code), EngineFailed)
    error = leaf(message)
    error.is_reported = True
    return error
