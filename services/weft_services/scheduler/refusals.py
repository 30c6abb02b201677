"""Why a request cannot be placed: the error that tells its client what to do about it. Asked only when nobody was
found."""

from __future__ import annotations

from collections.abc import Iterable, Set

from weft.errors import InvalidRequest, Overloaded, PeerLost, WeftError
from weft.request import ModelFingerprint, WorkerRole
from weft_services.scheduler.served import Served
from weft_services.scheduler.state import RouteQuery, Worker

MIN_RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 30.0


class NobodyReady(PeerLost):
    """No worker of a role takes requests. One may be back in a moment: a worker is started anew when it has died."""

    def __init__(self, message: str, role: WorkerRole) -> None:
        super().__init__(message)
        self.role = role


def refusal(served: Served, query: RouteQuery, role: WorkerRole, kinds: Set[ModelFingerprint] | None) -> WeftError:
    """Gone, starting or draining, too long for everyone, of another kind than its partners, or full: in this order."""
    live = served.decodes if role is WorkerRole.DECODE else served.prefills
    tried = [worker for worker in live if not query.excludes(worker)]
    ready = [worker for worker in tried if worker.report.ready and not (worker.drain_wish or worker.park_wish)]
    if not ready:
        if any(worker.report.is_full for worker in tried):
            return Overloaded(f"every {role} worker's pool is full", retry_after(tried))
        message = f"no {role} worker of {query.model!r} is {'ready' if live else 'live'}"
        # who passes over a live one does not wait for that one
        return PeerLost(message) if len(tried) < len(live) else NobodyReady(message, role)
    longest = max(worker.longest_prompt for worker in ready)
    if query.prompt_tokens > longest:
        message = f"the prompt has {query.prompt_tokens} tokens; at most {longest} fit"
        return InvalidRequest(message, "prompt", "context_length_exceeded")
    if kinds is not None and not any(worker.info.fingerprint in kinds for worker in ready):
        if role is WorkerRole.DECODE and not served.prefills:
            return NobodyReady(f"no prefill worker of {query.model!r} is live", WorkerRole.PREFILL)
        return PeerLost("no prefill worker runs what the decode workers run")
    return Overloaded(f"every {role} worker is full", retry_after(ready))


def retry_after(workers: Iterable[Worker]) -> float:
    """Seconds until the least loaded worker has worked off half of what is before it."""
    seconds = [
        max(worker.prefill_tokens * worker.token_seconds, worker.decode_tokens * worker.decode_token_seconds)
        for worker in workers
    ]
    return min(max(min(seconds, default=0.0) / 2, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)
