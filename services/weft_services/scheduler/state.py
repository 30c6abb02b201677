"""The plain values that policy, fleet and bookings share. No behaviour beyond arithmetic, no clock, no wire."""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.request import ModelFingerprint, RequestKey, WorkerAddress, WorkerRole

NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Who a worker is, as it said when it joined."""

    address: WorkerAddress
    role: WorkerRole
    model: str
    fingerprint: ModelFingerprint
    num_blocks: int
    max_context_tokens: int
    transport: str = ""
    metrics_address: str = ""

    @property
    def pool_tokens(self) -> int:
        """Tokens whose KV fits into its pool."""
        return self.num_blocks * self.fingerprint.block_tokens


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """A worker's own view of its load. A worker that has not reported yet is not ready."""

    num_running: int = 0
    num_waiting: int = 0
    queued_prefill_tokens: int = 0
    active_tokens: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    active_blocks: int = 0
    quarantined_blocks: int = 0
    ready: bool = False
    generated_tokens: int = 0
    computed_prompt_tokens: int = 0

    @property
    def is_idle(self) -> bool:
        """It holds no sequence at all."""
        return self.num_running == 0 and self.num_waiting == 0

    @property
    def is_full(self) -> bool:
        """Sequences hold the whole pool; a worker says "not ready" then as well."""
        return self.active_blocks > 0 and self.free_blocks + self.cached_blocks == 0


@dataclass(slots=True)
class Load:
    """What is booked on a worker: prompt tokens to compute, tokens to hold while decoding, requests."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    requests: int = 0


@dataclass(slots=True, eq=False)
class Worker:
    """A live worker. `Fleet` writes what it says of itself, `Bookings` writes `booked`, `fresh` and `last_chosen`.

    `fresh` is the part of `booked` that came after the last report, so that the report cannot know of it.
    Rates are tokens a second, None until measured: prompt tokens computed, tokens generated per running sequence.
    """

    info: WorkerInfo
    reported_at: float
    report: WorkerReport = field(default_factory=WorkerReport)
    num_reports: int = 0
    booked: Load = field(default_factory=Load)
    fresh: Load = field(default_factory=Load)
    prefill_rate: float | None = None
    decode_rate: float | None = None
    idle_since: float | None = None
    suspect_until: float = NEVER
    last_chosen: int = 0

    @property
    def worker_id(self) -> str:
        """Its stable name."""
        return self.info.address.worker_id

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens not yet computed: what we booked, or what it reports if others book there too."""
        return max(self.booked.prefill_tokens, self.report.queued_prefill_tokens + self.fresh.prefill_tokens)

    @property
    def decode_tokens(self) -> int:
        """Tokens of the sequences that decode there."""
        return max(self.booked.decode_tokens, self.report.active_tokens + self.fresh.decode_tokens)

    @property
    def kv_use(self) -> float:
        """Share of the pool that cannot be had by evicting cache, 0 to below 1; bookings count before they arrive."""
        held = self.report.active_blocks + self.report.quarantined_blocks
        booked = self.booked.decode_tokens / max(self.info.fingerprint.block_tokens, 1)
        return min(max(held, booked) / max(self.info.num_blocks, 1), 0.999)


@dataclass(frozen=True, slots=True)
class Preference:
    """Where a session's cache was last seen: worker ids, "" when unknown."""

    prefill_id: str = ""
    decode_id: str = ""


NO_PREFERENCE = Preference()


@dataclass(frozen=True, slots=True)
class RouteQuery:
    """A request, as much of it as routing needs."""

    key: RequestKey
    model: str
    prompt_tokens: int
    max_tokens: int
    session: bytes = b""
    excluded_worker_ids: frozenset[str] = frozenset()
    excluded_boot_ids: frozenset[str] = frozenset()

    def excludes(self, worker: Worker) -> bool:
        """Has the request failed on this worker, or on this boot of it."""
        address = worker.info.address
        return address.worker_id in self.excluded_worker_ids or address.boot_id in self.excluded_boot_ids


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes. `prefill` None: the decode worker computes the prompt. Tokens are what to book."""

    decode: Worker
    prefill: Worker | None
    prefill_tokens: int
    decode_tokens: int
    by_session: bool = False
