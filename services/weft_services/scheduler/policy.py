"""Where a request goes: the `Policy` protocol, and Weft's own policy. The caller passes the clock.

`CostPolicy` takes the cheapest workers by these costs in seconds:

prefill(worker) = wait + KV_PRESSURE_SECONDS * k / (1 - k) + uncached_weight * uncached tokens / rate + fetch
wait            = min(tokens ahead, MAX_WAIT_RATIO * prompts ahead * uncached tokens) / rate
decode(worker)  = (tokens in flight + own tokens it does not hold) / rate + KV_PRESSURE_SECONDS * k / (1 - k)

k is the share of the worker's KV pool in use. Cached tokens, on the worker or in the store, need no prefill. Near
ties go to the session's worker, then to the one with the fewest recently assigned tokens.

A prefill delays all later requests, more so on a busy fleet. Hence `uncached_weight`, and hence a session waits before
it moves. The decode worker computes the prompt itself if a hand-off would cost more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from weft.errors import InvalidRequest, NoWorker, Overloaded, PeerLost, SamplingChanged, WeftError
from weft.fleet_types import RouteQuery
from weft.request import ModelFingerprint, WorkerRole
from weft_services.scheduler.fleet_state import DEFAULT_STORE_CREDIT, INFINITE, ModelWorkers, Row, StoreCredit, Worker

# of `WorkerHello.pairing`
Pairing = tuple[ModelFingerprint, int]


@dataclass(frozen=True, slots=True)
class SessionAffinity:
    """Where a session's cache was last: worker ids with their boot ids, and its number of tokens. Unknown: "".

    `is_foreign`: another scheduler process wrote it, or an earlier start of this one.
    """

    prefill_id: str = ""
    decode_id: str = ""
    num_tokens: int = 0
    prefill_boot: str = ""
    decode_boot: str = ""
    is_foreign: bool = False


NO_AFFINITY = SessionAffinity()


@dataclass(frozen=True, slots=True)
class PrefixLocations:
    """Where the prefix of a prompt is cached, in tokens.

    `held`: by worker. `stored_tokens`: in the shared store, the last `disk_tokens` of them on disk only.
    `common_tokens`: the part that more than FEW_HOLDERS workers hold, such as a system prompt; another copy of it pays
    off. `credit`: what a token in the store saves.
    """

    held: Mapping[Worker, int] = field(default_factory=dict)
    stored_tokens: int = 0
    disk_tokens: int = 0
    common_tokens: int = 0
    credit: StoreCredit = DEFAULT_STORE_CREDIT


@dataclass(frozen=True, slots=True)
class RoutingInput:
    """A request with all that is known about it: cached prefixes, affinity, and the expected answer length."""

    query: RouteQuery
    prefixes: PrefixLocations = field(default_factory=PrefixLocations)
    affinity: SessionAffinity = NO_AFFINITY
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PlacementDecision:
    """Where a request goes, and the tokens to reserve. `prefill` None: the decode worker computes the prompt.

    `prefill_tokens` counts only tokens that must be computed. `ttft_seconds` and `itl_seconds` are predictions.
    """

    decode: Worker
    prefill: Worker | None
    prefill_tokens: int
    decode_tokens: int
    follows_session: bool = False
    ttft_seconds: float = 0.0
    wait_seconds: float = 0.0
    itl_seconds: float = 0.0
    cached_tokens: int = 0

    @property
    def compute_seconds(self) -> float:
        """Predicted time to compute the prompt."""
        return self.prefill_tokens * (self.prefill or self.decode).token_seconds


@dataclass(frozen=True, slots=True)
class BackfillWindow:
    """What a request may use ahead of a waiting one.

    `below_tokens`: by role, only workers on which so long a prompt does not fit. `longest_prompt`: the longest prompt
    that fits on those of them that take requests.
    """

    below_tokens: dict[WorkerRole, float] = field(default_factory=dict)
    longest_prompt: float = INFINITE
    num_bypassed: int = 0

    def admits(self, worker: Worker, role: WorkerRole) -> bool:
        """Return whether the worker may play that role for a backfilled request."""
        return not self.below_tokens or all(
            worker.longest_prompt < tokens for kept, tokens in self.below_tokens.items() if role.can(kept)
        )


UNRESTRICTED = BackfillWindow()


class Policy(Protocol):
    """Chooses where a request goes. It reads the fleet and the request, and changes neither; it never suspends."""

    def choose(
        self, members: ModelWorkers, routing: RoutingInput, now: float, window: BackfillWindow = UNRESTRICTED
    ) -> PlacementDecision:
        """Return the workers of the request and the tokens to reserve on them.

        `members`: the live workers of the request's model. `window`: the workers that a backfilled request may use.
        Raises PeerLost, Overloaded or InvalidRequest if no worker can take it.
        """


MIN_RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 30.0


class NoWorkerReady(NoWorker):
    """No worker of a role takes requests. One may be back within seconds: a dead worker is restarted."""

    def __init__(self, message: str, role: WorkerRole) -> None:
        super().__init__(message)
        self.role = role


class AllWorkersFull(Overloaded):
    """No worker of a role has room now; the request may wait for it."""

    def __init__(self, message: str, retry_after_seconds: float, role: WorkerRole) -> None:
        super().__init__(message, retry_after_seconds)
        self.role = role


# An uncached prompt token weighs more than one that waits already. The weight is 1 while workers are idle, since a
# second copy of a prefix helps too. It is much more once nearly all are busy, when only hits make room. Share and
# steepness are fitted on the conversation trace (loadtest.fleet compare): a lower weight has shorter waits at 60 and 80
# % load, a higher one at 95 %, with more hits.
IDLE_SHARE = 0.3
STEEPNESS = 2.5
MAX_UNCACHED_WEIGHT = 64.0
# costs this close are noise: a session stays, other requests spread; as a share of the request's own prefill time
TIE_SHARE = 0.02
TIE_SECONDS = 0.005
# Share of MAX_WAIT_RATIO for a prompt without any cached prefix. The whole ratio keeps a short rest with its prefix.
# Without a prefix, few prompts ahead matter more than few tokens (loadtest.fleet compare, Azure trace).
SPREAD_SHARE = 0.25
# weight of the affinity's token count; the prefix index is more reliable
AFFINITY_CREDIT = 0.5
# cost of a hand-off: a share of the prefill time, plus a round trip
HANDOFF_SHARE = 0.05
HANDOFF_SECONDS = 0.01
# a decode worker computes at most this much of a prompt, and only if it holds most of it
MAX_LOCAL_TOKENS = 256
MAX_LOCAL_SHARE = 0.5
# a local prefill delays every running sequence; weight of that against the prompt's own wait
STALL_SHARE = 0.1
# reservations that a worker takes, in pools: running and waiting for decode; waiting prompts hold no blocks
MAX_DECODE_POOLS = 2
MAX_PREFILL_POOLS = 4


class CostPolicy:
    """Weft's policy: the cheapest workers by the costs at the top of this file."""

    def choose(
        self, members: ModelWorkers, routing: RoutingInput, now: float, window: BackfillWindow = UNRESTRICTED
    ) -> PlacementDecision:
        """Return the cheapest workers, as `Policy.choose` describes."""
        return _Chooser(members, routing, now, uncached_weight(members.utilization), window).choose()


def uncached_weight(utilization: float) -> float:
    """Return the weight of an uncached token at this utilization.

    A second of work delays later requests more the busier the fleet is, and grows faster than queues, which grow as 1 /
    (1 - utilization).
    """
    idle = max(1.0 - utilization, 0.01)
    uncached_weight: float = (IDLE_SHARE / idle) ** STEEPNESS
    return min(max(uncached_weight, 1.0), MAX_UNCACHED_WEIGHT)


def held_tokens(routing: RoutingInput, worker: Worker) -> int:
    """Return the prompt tokens that need no prefill on the worker.

    The last one always needs it: it yields the first new token.
    """
    affinity, prefixes = routing.affinity, routing.prefixes
    held = prefixes.held.get(worker, 0)
    # our own entry adds nothing to the index that was written with it, if the index knows the prompt
    is_heard = affinity.is_foreign or not prefixes.held
    if is_heard and worker.worker_id in (affinity.prefill_id, affinity.decode_id):
        held = max(held, int(AFFINITY_CREDIT * affinity.num_tokens))
    return min(held, routing.query.prompt_tokens - 1)


def uncached_tokens(routing: RoutingInput, worker: Worker) -> int:
    """Return the tokens to compute there; tokens in the store count for the cost of fetching them."""
    return _uncomputed(routing, held_tokens(routing, worker))


def _uncomputed(routing: RoutingInput, held: int) -> int:
    return routing.query.prompt_tokens - held - int(_store_saves(routing, held))


def _store_saves(routing: RoutingInput, held: int) -> float:
    """Return the store's saving in tokens of prefill, if `held` tokens are on the worker already."""
    prefixes = routing.prefixes
    end = min(prefixes.stored_tokens, routing.query.prompt_tokens - 1)
    if end <= held:
        return 0.0
    on_disk = max(end - max(prefixes.stored_tokens - prefixes.disk_tokens, held), 0)
    return prefixes.credit.memory * (end - held - on_disk) + prefixes.credit.disk * on_disk


@dataclass(slots=True)
class _Candidate:
    worker: Worker
    cost: float


@dataclass(slots=True)
class _Chooser:
    """Decision for one request over the workers of one model."""

    members: ModelWorkers
    routing: RoutingInput
    now: float
    weight: float
    window: BackfillWindow

    def choose(self) -> PlacementDecision:
        """Pick the decode worker first, since it must have room for the answer; then the prefill worker, or one for
        both."""
        members = self.members
        if self.routing.query.computes_prompt:
            one = self._pick(WorkerRole.DECODE, self._combined_costs(), None).worker
            return self._decide(one, one)
        prefill_costs, decode_costs = self._prefill_costs(), self._decode_costs()
        partners = None if members.is_uniform else self._prefill_pairings(prefill_costs)
        decode = self._pick(WorkerRole.DECODE, decode_costs, partners)
        mates = None if members.is_uniform else {decode.worker.info.pairing}
        prefill = self._pick(WorkerRole.PREFILL, prefill_costs, mates)
        both = self._single_worker(decode, prefill, prefill_costs, decode_costs)
        return self._decide(both, both) if both else self._decide(decode.worker, prefill.worker)

    def _prefill_pairings(self, prefill_costs: Row) -> Set[Pairing]:
        """Return the pairings of workers that could compute the prompt.

        If there are none, return those of all prefill workers, so the error names the reason.
        """
        slots, prefills = self.members.prefill_slots, self.members.prefills
        able = {
            worker.info.pairing
            for worker in prefills
            if prefill_costs[slots[worker]] < INFINITE and self._is_eligible(WorkerRole.PREFILL, worker, None)
        }
        return able or {worker.info.pairing for worker in prefills}

    def _prefill_costs(self) -> Row:
        routing, members, last = self.routing, self.members, self.routing.query.prompt_tokens - 1
        slots, preferred = members.prefill_slots, members.by_id.get(routing.affinity.prefill_id)
        tokens, weighed = self._work(0)
        is_new = preferred is None and not routing.prefixes.held
        costs = members.prefill_costs(tokens * SPREAD_SHARE if is_new else tokens, weighed)
        costs += members.role_masks[WorkerRole.PREFILL]
        own, weight, before = 0, 0.0, -1  # most holders hold only the common prefix, so cache the last result
        for worker, tokens in routing.prefixes.held.items():
            if (slot := slots.get(worker)) is not None:
                if tokens != before:
                    before = tokens
                    own, weight = self._work(tokens if tokens < last else last)
                costs[slot] = worker.prefill_cost(own, weight)
        if preferred is not None and (slot := slots.get(preferred)) is not None:
            costs[slot] = preferred.prefill_cost(*self._work(held_tokens(routing, preferred)))
        return costs

    def _work(self, held: int) -> tuple[int, float]:
        """Return the tokens to compute with `held` tokens cached, and their weight as a cost.

        Fetched tokens delay no other request: the fetch runs while others compute.
        """
        prefixes, total = self.routing.prefixes, self.routing.query.prompt_tokens
        saved = _store_saves(self.routing, held)
        there = max(held, min(prefixes.stored_tokens, total - 1))
        own = total - max(there, prefixes.common_tokens)
        weight = self.weight * own + max(prefixes.common_tokens - there, 0) + (there - held - saved)
        return total - held - int(saved), weight

    def _decode_costs(self) -> Row:
        routing, members = self.routing, self.members
        own, last = routing.query.prompt_tokens + routing.output_tokens, routing.query.prompt_tokens - 1
        costs = members.decode_costs(own)
        costs += members.role_masks[WorkerRole.DECODE]
        slots, preferred = members.decode_slots, members.by_id.get(routing.affinity.decode_id)
        for worker, held in routing.prefixes.held.items():
            if (slot := slots.get(worker)) is not None:
                costs[slot] -= (held if held < last else last) * worker.decode_token_seconds
        if preferred is not None and (slot := slots.get(preferred)) is not None:
            known = min(routing.prefixes.held.get(preferred, 0), last)
            costs[slot] -= (held_tokens(routing, preferred) - known) * preferred.decode_token_seconds
        return costs

    def _combined_costs(self) -> Row:
        """Return the cost of decoding and computing the whole prompt on the same worker."""
        return self._decode_costs() + self.members.prefill_costs(*self._work(0))

    def _single_worker(
        self, decode: _Candidate, prefill: _Candidate, prefill_costs: Row, decode_costs: Row
    ) -> Worker | None:
        """Return the worker that should do both, or None if two are cheaper."""
        query, members = self.routing.query, self.members
        if prefill.worker is decode.worker:
            return decode.worker
        handoff = HANDOFF_SECONDS + HANDOFF_SHARE * query.prompt_tokens * prefill.worker.token_seconds
        if members.first_by_role[WorkerRole.BOTH] is not None:
            both = self._best(WorkerRole.BOTH, prefill_costs + decode_costs, None)
            if both is None or both.cost > prefill.cost + decode.cost + handoff:
                return None
            # a suspect worker does not replace a healthy pair
            is_needed = self._is_suspect(decode.worker) or self._is_suspect(prefill.worker)
            return both.worker if is_needed or not self._is_suspect(both.worker) else None
        # the affinity alone is no reason to prefill on a decode worker
        worker = decode.worker
        own = query.prompt_tokens - min(self.routing.prefixes.held.get(worker, 0), query.prompt_tokens - 1)
        if own > min(MAX_LOCAL_TOKENS, MAX_LOCAL_SHARE * query.prompt_tokens):
            return None
        stall = STALL_SHARE * worker.report.num_running * own
        local = (worker.prefill_tokens + self.weight * own + stall) * worker.token_seconds
        return worker if local <= prefill.cost + handoff else None

    def _pick(self, role: WorkerRole, costs: Row, pairings: Set[Pairing] | None) -> _Candidate:
        if (pick := self._best(role, costs, pairings)) is None:
            # in a backfill, the window may be why no partner was found
            raise rejection(self.members, self.routing.query, role, pairings if self.window is UNRESTRICTED else None)
        return pick

    def _best(self, role: WorkerRole, costs: Row, pairings: Set[Pairing] | None) -> _Candidate | None:
        """Return the cheapest eligible worker; a suspect one only if there is no other.

        The first look nearly always succeeds, so the others are vetted only if it fails.
        """
        pick, workers = self._cheapest(role, costs), self.members.workers
        if pick is None or (self._is_eligible(role, pick.worker, pairings) and not self._is_suspect(pick.worker)):
            return pick
        able = costs.copy()
        for slot in np.flatnonzero(costs < INFINITE):
            if not self._is_eligible(role, workers[slot], pairings):
                able[slot] = INFINITE
        trusted = able.copy()
        for slot in np.flatnonzero(able < INFINITE):
            if self._is_suspect(workers[slot]):
                trusted[slot] = INFINITE
        return self._cheapest(role, trusted) or self._cheapest(role, able)

    def _is_suspect(self, worker: Worker) -> bool:
        return worker.suspect_until > self.now

    def _cheapest(self, role: WorkerRole, costs: Row) -> _Candidate | None:
        """Among near ties return the session's worker, else the one with the fewest recently assigned tokens."""
        members, affinity = self.members, self.routing.affinity
        first = members.first_by_role[role]
        # argmin takes a third of the time of min
        if first is None or (best := float(costs[costs.argmin()])) == INFINITE:
            return None
        limit = best + TIE_SECONDS + TIE_SHARE * self.routing.query.prompt_tokens * first.token_seconds
        (tied,) = (costs <= limit).nonzero()
        if len(tied) == 1:
            return _Candidate(members.workers[tied[0]], best)
        for name in (affinity.prefill_id, affinity.decode_id):
            if (own := members.by_id.get(name)) is not None and costs[members.slots[own]] <= limit:
                return _Candidate(own, best)
        return _Candidate(members.workers[tied[members.dispatched_tokens[tied].argmin()]], best)

    def _is_eligible(self, role: WorkerRole, worker: Worker, pairings: Set[Pairing] | None) -> bool:
        query = self.routing.query
        if query.excludes(worker.info) or query.prompt_tokens > worker.longest_prompt:
            return False
        if pairings is not None and worker.info.pairing not in pairings:
            return False
        return self.window.admits(worker, role) and has_room(worker, role, self.routing)

    def _decide(self, decode: Worker, prefill: Worker) -> PlacementDecision:
        routing, affinity = self.routing, self.routing.affinity
        held = held_tokens(routing, prefill)
        own = _uncomputed(routing, held)
        handoff = 0.0 if prefill is decode else HANDOFF_SECONDS
        needed = routing.query.prompt_tokens + routing.output_tokens
        wait = prefill.wait_seconds(own) + decode.kv_wait_seconds(needed, routing.output_tokens)
        return PlacementDecision(
            decode=decode,
            prefill=None if prefill is decode else prefill,
            prefill_tokens=own,
            decode_tokens=needed,
            follows_session=decode.worker_id == affinity.decode_id or prefill.worker_id == affinity.prefill_id,
            ttft_seconds=wait + own * prefill.token_seconds + handoff,
            wait_seconds=wait,
            itl_seconds=decode.speed.itl_seconds(max(decode.report.num_running, decode.reserved.requests) + 1),
            cached_tokens=held,
        )


def has_room(worker: Worker, role: WorkerRole, routing: RoutingInput) -> bool:
    """Return whether the request may be reserved there. An idle worker takes any request that fits its pool."""
    booked, info = worker.reserved, worker.info
    if booked.requests == 0:
        return True
    if booked.requests >= info.num_blocks:
        return False  # a live sequence holds at least one block
    decode = worker.decode_tokens + routing.query.prompt_tokens + routing.output_tokens
    if role is not WorkerRole.PREFILL and decode > MAX_DECODE_POOLS * info.pool_tokens:
        return False
    if role is WorkerRole.DECODE:
        return True
    return worker.prefill_tokens + uncached_tokens(routing, worker) <= MAX_PREFILL_POOLS * info.pool_tokens


def rejection(members: ModelWorkers, query: RouteQuery, role: WorkerRole, pairings: Set[Pairing] | None) -> WeftError:
    """Return the error that tells the client why no worker was found.

    Checked in this order: sampling version, prompt too long, worker gone, starting or draining, no matching pairing,
    full. A live worker that does not serve counts only if the prompt fits there. While no worker is ready no prompt is
    too long: a larger worker may still join.
    """
    live = members.decodes if role is WorkerRole.DECODE else members.prefills
    if any(_all_sample_otherwise(workers, query) for workers in (members.decodes, members.prefills)):
        what = f"sampling version {query.sampling_version}, with which the answer began"
        return SamplingChanged(f"no pair of workers of {query.model!r} has {what}; send the request again")
    able = [worker for worker in live if query.prompt_tokens <= worker.longest_prompt]
    is_apart = any(worker.is_ready and query.prompt_tokens > worker.longest_prompt for worker in live)
    if not able and is_apart:
        message = f"the prompt has {query.prompt_tokens} tokens; at most {max(w.longest_prompt for w in live)} fit"
        return InvalidRequest(message, "prompt", "context_length_exceeded")
    able = able or live
    tried = [worker for worker in able if not query.excludes(worker.info)]
    ready = [worker for worker in tried if worker.is_ready]
    kind = f"{role} worker" if len(able) == len(live) else f"{role} worker that has room for the prompt"
    if not ready:
        if any(worker.takes_requests for worker in tried):
            return AllWorkersFull(f"the pool of every {kind} is full", retry_after(tried), role)
        message = f"no {kind} of {query.model!r} is {'ready' if live else 'live'}"
        # A request that excludes a live worker does not wait for that one. One that needs a larger worker would wake at
        # every report of a smaller one.
        return PeerLost(message) if is_apart or len(tried) < len(able) else NoWorkerReady(message, role)
    if pairings is not None and not any(worker.info.pairing in pairings for worker in ready):
        if role is WorkerRole.DECODE and not members.prefills:
            return NoWorkerReady(f"no prefill worker of {query.model!r} is live", WorkerRole.PREFILL)
        return PeerLost("no prefill worker runs what the decode workers run")
    return AllWorkersFull(f"every {kind} is full", retry_after(ready), role)


def _all_sample_otherwise(live: Sequence[Worker], query: RouteQuery) -> bool:
    version = query.sampling_version
    return version is not None and bool(live) and all(worker.info.sampling_version != version for worker in live)


def retry_after(workers: Iterable[Worker]) -> float:
    """Return the seconds until the least loaded worker has done half of its work."""
    seconds = [
        max(worker.prefill_tokens * worker.token_seconds, worker.decode_tokens * worker.decode_token_seconds)
        for worker in workers
    ]
    return clamp_retry(min(seconds, default=0.0) / 2)


def clamp_retry(seconds: float) -> float:
    """Limit a Retry-After to MIN_RETRY_SECONDS to MAX_RETRY_SECONDS."""
    return min(max(seconds, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS)
