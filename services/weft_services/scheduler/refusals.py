"""Why a request cannot be placed: the error that tells its client what to do about it. Asked only when nobody was
found."""

from __future__ import annotations

from collections.abc import Iterable, Set

from weft.errors import InvalidRequest, NoWorker, Overloaded, PeerLost, WeftError
from weft.request import ModelFingerprint, WorkerRole
from weft_services.scheduler.fleet import serves
from weft_services.scheduler.served import Served
from weft_services.scheduler.state import RouteQuery, Worker

MIN_RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 30.0


class NobodyReady(NoWorker):
    """No worker of a role takes requests. One may be back in a moment: a worker is started anew when it has died."""

    def __init__(self, message: str, role: WorkerRole) -> None:
        super().__init__(message)
        self.role = role


class Full(Overloaded):
    """No worker of a role has room now: it may be waited for."""

    def __init__(self, message: str, retry_after_seconds: float, role: WorkerRole) -> None:
        super().__init__(message, retry_after_seconds)
        self.role = role


def refusal(served: Served, query: RouteQuery, role: WorkerRole, kinds: Set[ModelFingerprint] | None) -> WeftError:
    """Too long for everyone, gone, starting or draining, of another kind than its partners, or full: in this order.

    Who is away counts only if the prompt fits there. While nobody is ready no prompt is too long: a larger worker may
    still come.
    """
    live = served.decodes if role is WorkerRole.DECODE else served.prefills
    able = [worker for worker in live if query.prompt_tokens <= worker.longest_prompt]
    is_apart = any(is_ready(worker) and query.prompt_tokens > worker.longest_prompt for worker in live)
    if not able and is_apart:
        message = f"the prompt has {query.prompt_tokens} tokens; at most {max(w.longest_prompt for w in live)} fit"
        return InvalidRequest(message, "prompt", "context_length_exceeded")
    able = able or live
    tried = [worker for worker in able if not query.excludes(worker)]
    ready = [worker for worker in tried if is_ready(worker)]
    who = f"{role} worker" if len(able) == len(live) else f"{role} worker that has room for the prompt"
    if not ready:
        if any(map(serves, tried)):
            return Full(f"the pool of every {who} is full", retry_after(tried), role)
        message = f"no {who} of {query.model!r} is {'ready' if live else 'live'}"
        # who passes over a live one does not wait for that one; who needs a larger one would be woken by every report
        # of a smaller one
        return PeerLost(message) if is_apart or len(tried) < len(able) else NobodyReady(message, role)
    if kinds is not None and not any(worker.info.fingerprint in kinds for worker in ready):
        if role is WorkerRole.DECODE and not served.prefills:
            return NobodyReady(f"no prefill worker of {query.model!r} is live", WorkerRole.PREFILL)
        return PeerLost("no prefill worker runs what the decode workers run")
    return Full(f"every {who} is full", retry_after(ready), role)


def is_ready(worker: Worker) -> bool:
    """It takes requests."""
    return worker.report.ready and not (worker.drain_wish or worker.park_wish)


def retry_after(workers: Iterable[Worker]) -> float:
    """Seconds until the least loaded worker has worked off half of what is before it."""
    seconds = [
        max(worker.prefill_tokens * worker.token_seconds, worker.decode_tokens * worker.decode_token_seconds)
        for worker in workers
    ]
    return clamp_retry(min(seconds, default=0.0) / 2)


def clamp_retry(seconds: float) -> float:
    """A Retry-After between the least and the most that clients are given."""
    return min(max(seconds, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)
