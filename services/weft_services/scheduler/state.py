"""The plain values that policy, fleet and bookings share. No behaviour beyond arithmetic, no clock, no wire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weft.request import ModelFingerprint, RequestKey, WorkerAddress, WorkerRole
from weft.worker_stats import NO_TALLIES, Tallies
from weft_services.scheduler.speed import DEFAULT_DECODE_RATE, DEFAULT_PREFILL_RATE, USUAL_CREDIT, Credit, Speed

NEVER = float("-inf")
INFINITE = float("inf")
# cheap until the pool is nearly full, then steep: the shape of a queueing delay
LAMBDA_SECONDS = 0.15
# engines let short prompts overtake long ones: for each prompt before it one waits so many times its own work at most.
# Fitted on the conversation trace (loadtest.fleet compare)
MAX_WAIT_RATIO = 8.0
# of what a worker tells the policy, in the order in which it does
NUM_ROWS = 7
# a full pool costs much, and not without end
MAX_USE = 0.999
# a request whose gateway names no deadline
DEFAULT_REQUEST_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Who a worker is, as it said when it joined; `role` as it said last."""

    address: WorkerAddress
    role: WorkerRole
    model: str
    fingerprint: ModelFingerprint
    num_blocks: int
    max_context_tokens: int
    transport: str = ""
    metrics_address: str = ""
    can_change_role: bool = False

    @property
    def pool_tokens(self) -> int:
        """Tokens whose KV fits into its pool."""
        return self.num_blocks * self.fingerprint.block_tokens


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """A worker's own view of its load. A worker that has not reported yet is not ready. `hand_offs` is as it came, for
    people who ask: here nobody looks into it."""

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
    is_draining: bool = False
    is_parked: bool = False
    tallies: Tallies = NO_TALLIES
    hand_offs: Sequence[Any] = ()
    role: WorkerRole | None = None
    full: bool | None = None

    @property
    def is_idle(self) -> bool:
        """It holds no sequence at all."""
        return self.num_running == 0 and self.num_waiting == 0

    @property
    def is_full(self) -> bool:
        """Sequences hold the whole pool; a worker says "not ready" then as well. An older one does not say why."""
        if self.full is None:
            return self.active_blocks > 0 and self.free_blocks + self.cached_blocks == 0
        return self.full


@dataclass(slots=True)
class Load:
    """What is booked on a worker: prompt tokens to compute, tokens to hold while decoding, requests, and prompts that
    are not computed yet."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    requests: int = 0
    prompts: int = field(default=0, compare=False)

    def add(self, prefill_tokens: int, decode_tokens: int) -> None:
        """Add one request's tokens, or remove them when negative."""
        self.prompts += (prefill_tokens > 0) - (prefill_tokens < 0)
        self.prefill_tokens += prefill_tokens
        self.decode_tokens += decode_tokens


@dataclass(slots=True, eq=False)
class Worker:
    """A live worker. `Fleet` writes what it says of itself, `Bookings` writes `booked`, `fresh` and
    `dispatched_tokens`; whoever has written calls `refresh`. `fresh` is the part of `booked` that came after the last
    report, so that the report cannot know of it; `returned` is what came to its end since, of what the report counts
    still. `dispatched_tokens` is what it was given of late: among equals it is the turn of whoever was given least. The
    six after it are what the policy reads, worked out once a change and not once a request: what the fill of its pool
    counts for, seconds of work before a new prompt, the most that a prompt waits for each of its tokens, seconds of
    work before a new sequence (the pool's fill included), and seconds that a token of each takes. `column` is where
    `Served` has all seven beside those of the others.
    """

    info: WorkerInfo
    reported_at: float
    report: WorkerReport = field(default_factory=WorkerReport)
    num_reports: int = 0
    booked: Load = field(default_factory=Load)
    fresh: Load = field(default_factory=Load)
    returned: Load = field(default_factory=Load)
    speed: Speed = field(default_factory=Speed)
    idle_since: float | None = None
    suspect_until: float = NEVER
    is_probed: bool = False  # a request is there to find out whether it should be suspected still
    num_faults: int = 0
    drain_wish: bool | None = None
    park_wish: bool | None = None
    role_wish: WorkerRole | None = None
    num_declined: int = 0  # roles in a row that it was asked to play and did not
    dispatched_tokens: float = 0.0
    pressure_seconds: float = INFINITE
    prefill_seconds: float = 0.0
    overtaken_seconds: float = 0.0
    decode_seconds: float = INFINITE
    token_seconds: float = 1 / DEFAULT_PREFILL_RATE
    decode_token_seconds: float = 1 / DEFAULT_DECODE_RATE
    column: NDArray[np.float64] = field(default_factory=lambda: np.empty(NUM_ROWS), repr=False)

    @property
    def worker_id(self) -> str:
        """Its stable name."""
        return self.info.address.worker_id

    @property
    def longest_prompt(self) -> int:
        """In tokens; the answer needs room for one more."""
        return min(self.info.max_context_tokens, self.info.pool_tokens) - 1

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens not yet computed: what we booked, or what it reports if others book there too."""
        reported = self.report.queued_prefill_tokens - self.returned.prefill_tokens
        known = reported + self.fresh.prefill_tokens if reported > 0 else self.fresh.prefill_tokens
        return known if known > self.booked.prefill_tokens else self.booked.prefill_tokens

    @property
    def decode_tokens(self) -> int:
        """Tokens of the sequences that decode there."""
        reported = self.report.active_tokens - self.returned.decode_tokens
        known = reported + self.fresh.decode_tokens if reported > 0 else self.fresh.decode_tokens
        return known if known > self.booked.decode_tokens else self.booked.decode_tokens

    def wait_seconds(self, own_tokens: int) -> float:
        """How long a prompt of which so many tokens have to be computed waits here: for those before it, but short ones
        do not wait for all of long ones (`weft.engine.waiting`)."""
        return min(self.prefill_seconds, own_tokens * self.overtaken_seconds)

    def room_seconds(self, own_tokens: int, output_tokens: int) -> float:
        """How long a new sequence of `own_tokens` waits for KV blocks. Sequences release a pool in the time that one
        answer takes. Bookings overestimate, so the wait is 0 until the worker itself reports waiting sequences."""
        lacking = self.decode_tokens + own_tokens - self.info.pool_tokens
        if lacking <= 0 or not self.report.num_waiting:
            return 0.0
        answer_seconds = output_tokens * self.speed.itl_seconds(max(self.report.num_running, 1))
        return lacking / (self.info.pool_tokens or 1) * answer_seconds

    def prefill_cost(self, own_tokens: int, weight: float) -> float:
        """Of a prompt of which so many tokens have to be computed here, and weigh that much."""
        overtaken = own_tokens * self.overtaken_seconds
        wait = self.prefill_seconds if self.prefill_seconds < overtaken else overtaken
        # in the order in which `Served.prefill_costs` adds, so that both round alike
        return wait + self.pressure_seconds + weight * self.token_seconds

    @property
    def kv_use(self) -> float:
        """Share of the pool that cannot be had by evicting cache, 0 to below 1; bookings count before they arrive."""
        report, info = self.report, self.info
        held = report.active_blocks + report.quarantined_blocks
        booked = self.booked.decode_tokens / (info.fingerprint.block_tokens or 1)
        use = (held if held > booked else booked) / (info.num_blocks or 1)
        return use if use < MAX_USE else MAX_USE

    def refresh(self) -> None:
        """Work out what the policy reads, after any change above."""
        report = self.report
        if not report.ready or self.drain_wish or self.park_wish:
            self.pressure_seconds = self.decode_seconds = INFINITE
        else:
            use, token_seconds = self.kv_use, self.token_seconds
            self.pressure_seconds = pressure = LAMBDA_SECONDS * use / (1.0 - use)
            self.prefill_seconds = self.prefill_tokens * token_seconds
            booked, known = self.booked.requests or 1, report.num_running + report.num_waiting
            self.overtaken_seconds = MAX_WAIT_RATIO * (known if known > booked else booked) * token_seconds
            self.decode_seconds = self.decode_tokens * self.decode_token_seconds + pressure
        self.tell()

    def tell(self) -> None:
        """Write what the policy reads where it reads it."""
        column = self.column
        column[0] = self.pressure_seconds
        column[1] = self.prefill_seconds
        column[2] = self.overtaken_seconds
        column[3] = self.token_seconds
        column[4] = self.decode_seconds
        column[5] = self.decode_token_seconds
        column[6] = self.dispatched_tokens


@dataclass(frozen=True, slots=True)
class Preference:
    """Where a session's cache was last seen: worker ids, "" when unknown, and which starts of them; and how many tokens
    lay there. `is_news`: another scheduler saw it, or this one before it was started."""

    prefill_id: str = ""
    decode_id: str = ""
    num_tokens: int = 0
    prefill_boot: str = ""
    decode_boot: str = ""
    is_news: bool = False


NO_PREFERENCE = Preference()


class Priority(IntEnum):
    """Who is served first when not all can be; lower is sooner."""

    INTERACTIVE = 0
    DEFAULT = 1
    BATCH = 2


@dataclass(frozen=True, slots=True)
class RouteQuery:
    """A request, as much of it as routing needs. `remaining_seconds`: how long its client waits for the end;
    `resumed_tokens`: how much of the prompt is the answer's own, by earlier attempts; `computes_prompt`: where it
    decodes, and all of it, whatever is cached; `gateway_id`: who settles it."""

    key: RequestKey
    model: str
    prompt_tokens: int
    max_tokens: int
    session: bytes = b""
    excluded_worker_ids: frozenset[str] = frozenset()
    excluded_boot_ids: frozenset[str] = frozenset()
    block_keys: Sequence[bytes] = ()
    remaining_seconds: float = DEFAULT_REQUEST_SECONDS
    priority: Priority = Priority.DEFAULT
    tenant: bytes = b""
    reject_if_busy: bool = False
    resumed_tokens: int = 0
    computes_prompt: bool = False
    gateway_id: str = ""

    def excludes(self, worker: Worker) -> bool:
        """Has the request failed on this worker, or on this boot of it."""
        address = worker.info.address
        return address.worker_id in self.excluded_worker_ids or address.boot_id in self.excluded_boot_ids


@dataclass(frozen=True, slots=True)
class Prefixes:
    """What is known of where a prompt's prefix lies: tokens by worker, and in the store that all share, the last
    `disk_tokens` of those on its disk only. `common_tokens`: the part that more than a few workers hold, such as a
    system prompt. Another copy pays off. `credit`: what a token in the store saves."""

    held: Mapping[Worker, int] = field(default_factory=dict)
    stored_tokens: int = 0
    disk_tokens: int = 0
    common_tokens: int = 0
    credit: Credit = USUAL_CREDIT


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request asks of the fleet: itself, what is cached of it where, and how long its answer will be."""

    query: RouteQuery
    prefixes: Prefixes = field(default_factory=Prefixes)
    preference: Preference = NO_PREFERENCE
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes. `prefill` None: the decode worker computes the prompt. Tokens are what to book:
    `prefill_tokens` only those that have to be computed. `ttft_seconds` and `itl_seconds` are predictions."""

    decode: Worker
    prefill: Worker | None
    prefill_tokens: int
    decode_tokens: int
    by_session: bool = False
    ttft_seconds: float = 0.0
    wait_seconds: float = 0.0
    itl_seconds: float = 0.0
    held_tokens: int = 0

    @property
    def own_seconds(self) -> float:
        """What computing the prompt takes."""
        return self.prefill_tokens * (self.prefill or self.decode).token_seconds
