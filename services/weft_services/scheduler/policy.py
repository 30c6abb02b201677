"""Where a request goes: pure functions over plain state, with the clock passed in. Books nothing, waits for nothing.

    prefill(worker) = wait for those before it  +  LAMBDA k / (1 - k)  +  care * uncached tokens / its rate  +  fetching
    wait            = min(tokens before it, MAX_WAIT_RATIO * prompts before it * uncached tokens) / its rate
    decode(worker)  = (tokens in flight + own tokens it does not hold) / its rate  +  LAMBDA k / (1 - k)

k = share of its KV pool in use; what a worker or the store holds of the prompt need not be computed. The cheapest wins;
near ties go to the worker with the fewest bookings, then to the one chosen longest ago. Computing a prompt costs all
who come after it too, the more the busier the fleet: that is why uncached tokens weigh `care` times, and why a
session waits a while before it moves. A prompt is computed where it decodes when handing it over would cost more.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

import numpy as np

from weft.errors import NotFound
from weft.request import ModelFingerprint, WorkerRole
from weft_services.scheduler.passing import FREE, Passage
from weft_services.scheduler.refusals import refusal
from weft_services.scheduler.served import Row, Served
from weft_services.scheduler.state import INFINITE, Demand, Placement, Worker

# how much more a prompt token that must be computed weighs than one that waits already: no more while there are idle
# workers, since a second copy of a prefix is of use too; much more once nearly all are busy, when only hits make room.
# Share and steepness are fitted on the conversation trace (loadtest.fleet compare): less care has shorter waits at 60
# and 80 % load, more has at 95 %, and more hits
IDLE_SHARE = 0.3
STEEPNESS = 2.5
MAX_CARE = 64.0
# costs this close are noise: a session stays where it is, others are spread. A share of what the request itself takes
TIE_SHARE = 0.02
TIE_SECONDS = 0.005
# Of MAX_WAIT_RATIO, for a prompt of which nothing is cached anywhere. The whole ratio keeps a short rest with its
# prefix. With nothing cached, few prompts before it count more than few tokens (loadtest.fleet compare, Azure trace).
SPREAD_SHARE = 0.25
# a session's own word on where its cache is counts less than what was dispatched there, by who knows that
CLAIM_CREDIT = 0.5
# moving blocks to another worker: a part of what computing them takes, and a round trip
HANDOFF_SHARE = 0.05
HANDOFF_SECONDS = 0.01
# a worker that only decodes computes no more of a prompt than this, and only when it holds most of it
MAX_LOCAL_TOKENS = 256
MAX_LOCAL_SHARE = 0.5
# every running sequence waits while a prompt is computed among them; how much that counts against the prompt's own wait
STALL_SHARE = 0.1
# bookings a worker takes, in pools: running and waiting for decode; prompts waiting hold no blocks
MAX_DECODE_POOLS = 2
MAX_PREFILL_POOLS = 4


def choose(models: Mapping[str, Served], demand: Demand, now: float, passage: Passage = FREE) -> Placement:
    """Where the request goes. `models`: every model ever served and its live workers; `passage`: which of them it may
    take, where it goes past others.

    Raises PeerLost, Overloaded, NotFound or InvalidRequest, having changed nothing.
    """
    model = demand.query.model
    if models and model not in models:
        raise NotFound(f"no worker serves the model {model!r}")
    served = models.get(model) or Served()
    return _View(served, demand, now, care_at(served.utilization), passage).choose()


def care_at(utilization: float) -> float:
    """The weight of an uncached token: what a second of work costs those behind it grows faster than their queues,
    which grow as 1 / (1 - utilization)."""
    idle = max(1.0 - utilization, 0.01)
    care: float = (IDLE_SHARE / idle) ** STEEPNESS
    return min(max(care, 1.0), MAX_CARE)


def held_tokens(demand: Demand, worker: Worker) -> int:
    """Tokens of the prompt that need not be computed there. The last one always is: it gives the first new token."""
    preference, prefixes = demand.preference, demand.prefixes
    held = prefixes.held.get(worker, 0)
    # our own word of old says no more than the index that was written with it, where that knows anything at all
    is_heard = preference.is_news or not prefixes.held
    if is_heard and worker.worker_id in (preference.prefill_id, preference.decode_id):
        held = max(held, int(CLAIM_CREDIT * preference.num_tokens))
    return min(held, demand.query.prompt_tokens - 1)


def uncached_tokens(demand: Demand, worker: Worker) -> int:
    """Tokens to compute there, with what comes out of the store counted for what fetching it costs."""
    return _uncomputed(demand, held_tokens(demand, worker))


def _uncomputed(demand: Demand, held: int) -> int:
    return demand.query.prompt_tokens - held - int(_store_saves(demand, held))


def _store_saves(demand: Demand, held: int) -> float:
    """How many tokens' worth of computing, where so many are held already."""
    prefixes = demand.prefixes
    end = min(prefixes.stored_tokens, demand.query.prompt_tokens - 1)
    if end <= held:
        return 0.0
    on_disk = max(end - max(prefixes.stored_tokens - prefixes.disk_tokens, held), 0)
    return prefixes.credit.memory * (end - held - on_disk) + prefixes.credit.disk * on_disk


@dataclass(slots=True)
class _Pick:
    """A worker and its cost."""

    worker: Worker
    cost: float


@dataclass(slots=True)
class _View:
    """One request before one model's workers."""

    served: Served
    demand: Demand
    now: float
    care: float
    passage: Passage

    def choose(self) -> Placement:
        """Decode first: it must have room for the answer. Then who computes the prompt, and whether they are one."""
        served = self.served
        if self.demand.query.computes_prompt:
            one = self._pick(WorkerRole.DECODE, self._whole_costs(), None).worker
            return self._placed(one, one)
        prefill_costs, decode_costs = self._prefill_costs(), self._decode_costs()
        partners = None if served.is_uniform else self._partners(prefill_costs)
        decode = self._pick(WorkerRole.DECODE, decode_costs, partners)
        mates = None if served.is_uniform else {decode.worker.info.fingerprint}
        prefill = self._pick(WorkerRole.PREFILL, prefill_costs, mates)
        both = self._one(decode, prefill, prefill_costs, decode_costs)
        return self._placed(both, both) if both else self._placed(decode.worker, prefill.worker)

    def _partners(self, prefill_costs: Row) -> Set[ModelFingerprint]:
        """What those run who could compute the prompt; where nobody could, all, so that the refusal says why."""
        slots, prefills = self.served.prefill_slots, self.served.prefills
        able = {
            worker.info.fingerprint
            for worker in prefills
            if prefill_costs[slots[worker]] < INFINITE and self._can(WorkerRole.PREFILL, worker, None)
        }
        return able or {worker.info.fingerprint for worker in prefills}

    def _prefill_costs(self) -> Row:
        demand, served, last = self.demand, self.served, self.demand.query.prompt_tokens - 1
        slots, preferred = served.prefill_slots, served.by_id.get(demand.preference.prefill_id)
        tokens, weighed = self._work(0)
        is_new = preferred is None and not demand.prefixes.held
        costs = served.prefill_costs(tokens * SPREAD_SHARE if is_new else tokens, weighed)
        costs += served.bars[WorkerRole.PREFILL]
        own, weight, before = 0, 0.0, -1  # nearly all who hold anything hold what is common, and no more
        for worker, tokens in demand.prefixes.held.items():
            if (slot := slots.get(worker)) is not None:
                if tokens != before:
                    before = tokens
                    own, weight = self._work(tokens if tokens < last else last)
                costs[slot] = worker.prefill_cost(own, weight)
        if preferred is not None and (slot := slots.get(preferred)) is not None:
            costs[slot] = preferred.prefill_cost(*self._work(held_tokens(demand, preferred)))
        return costs

    def _work(self, held: int) -> tuple[int, float]:
        """Tokens to compute where so many are held, and how many they count for against a worker. What is fetched costs
        nobody else anything: it comes while others compute."""
        prefixes, total = self.demand.prefixes, self.demand.query.prompt_tokens
        saved = _store_saves(self.demand, held)
        there = max(held, min(prefixes.stored_tokens, total - 1))
        own = total - max(there, prefixes.common_tokens)
        weight = self.care * own + max(prefixes.common_tokens - there, 0) + (there - held - saved)
        return total - held - int(saved), weight

    def _decode_costs(self) -> Row:
        demand, served = self.demand, self.served
        own, last = demand.query.prompt_tokens + demand.output_tokens, demand.query.prompt_tokens - 1
        costs = served.decode_costs(own)
        costs += served.bars[WorkerRole.DECODE]
        slots, preferred = served.decode_slots, served.by_id.get(demand.preference.decode_id)
        for worker, held in demand.prefixes.held.items():
            if (slot := slots.get(worker)) is not None:
                costs[slot] -= (held if held < last else last) * worker.decode_token_seconds
        if preferred is not None and (slot := slots.get(preferred)) is not None:
            known = min(demand.prefixes.held.get(preferred, 0), last)
            costs[slot] -= (held_tokens(demand, preferred) - known) * preferred.decode_token_seconds
        return costs

    def _whole_costs(self) -> Row:
        """Of whoever decodes and computes all of the prompt."""
        return self._decode_costs() + self.served.prefill_costs(*self._work(0))

    def _one(self, decode: _Pick, prefill: _Pick, prefill_costs: Row, decode_costs: Row) -> Worker | None:
        """The worker that had better do both, if there is one."""
        query, served = self.demand.query, self.served
        if prefill.worker is decode.worker:
            return decode.worker
        handoff = HANDOFF_SECONDS + HANDOFF_SHARE * query.prompt_tokens * prefill.worker.token_seconds
        if served.firsts[WorkerRole.BOTH] is not None:
            both = self._best(WorkerRole.BOTH, prefill_costs + decode_costs, None)
            if both is None or both.cost > prefill.cost + decode.cost + handoff:
                return None
            # one that has just failed is no other to a pair that has not
            is_needed = self._is_suspect(decode.worker) or self._is_suspect(prefill.worker)
            return both.worker if is_needed or not self._is_suspect(both.worker) else None
        # a session's word is not enough to compute among those that generate
        worker = decode.worker
        own = query.prompt_tokens - min(self.demand.prefixes.held.get(worker, 0), query.prompt_tokens - 1)
        if own > min(MAX_LOCAL_TOKENS, MAX_LOCAL_SHARE * query.prompt_tokens):
            return None
        stall = STALL_SHARE * worker.report.num_running * own
        local = (worker.prefill_tokens + self.care * own + stall) * worker.token_seconds
        return worker if local <= prefill.cost + handoff else None

    def _pick(self, role: WorkerRole, costs: Row, kinds: Set[ModelFingerprint] | None) -> _Pick:
        if (pick := self._best(role, costs, kinds)) is None:
            # who goes past others may have found no partner because of them
            raise refusal(self.served, self.demand.query, role, kinds if self.passage is FREE else None)
        return pick

    def _best(self, role: WorkerRole, costs: Row, kinds: Set[ModelFingerprint] | None) -> _Pick | None:
        """The cheapest worker that can take the request, if there is one; one that a request has just failed on only
        when there is no other. Nearly always the first look is the last, so the others are vetted only when it is
        not."""
        pick, workers = self._cheapest(role, costs), self.served.workers
        if pick is None or (self._can(role, pick.worker, kinds) and not self._is_suspect(pick.worker)):
            return pick
        able = costs.copy()
        for slot in np.flatnonzero(costs < INFINITE):
            if not self._can(role, workers[slot], kinds):
                able[slot] = INFINITE
        trusted = able.copy()
        for slot in np.flatnonzero(able < INFINITE):
            if self._is_suspect(workers[slot]):
                trusted[slot] = INFINITE
        return self._cheapest(role, trusted) or self._cheapest(role, able)

    def _is_suspect(self, worker: Worker) -> bool:
        return worker.suspect_until > self.now

    def _cheapest(self, role: WorkerRole, costs: Row) -> _Pick | None:
        """Among those that cost about the same one that the session knows, or whoever was given least."""
        served, preference = self.served, self.demand.preference
        first = served.firsts[role]
        # the place of the least is found in a third of the time that the least itself is
        if first is None or (best := float(costs[costs.argmin()])) == INFINITE:
            return None
        limit = best + TIE_SECONDS + TIE_SHARE * self.demand.query.prompt_tokens * first.token_seconds
        (tied,) = (costs <= limit).nonzero()
        if len(tied) == 1:
            return _Pick(served.workers[tied[0]], best)
        for name in (preference.prefill_id, preference.decode_id):
            if (own := served.by_id.get(name)) is not None and costs[served.slots[own]] <= limit:
                return _Pick(own, best)
        return _Pick(served.workers[tied[served.dispatched_tokens[tied].argmin()]], best)

    def _can(self, role: WorkerRole, worker: Worker, kinds: Set[ModelFingerprint] | None) -> bool:
        query = self.demand.query
        if query.excludes(worker) or query.prompt_tokens > worker.longest_prompt:
            return False
        if kinds is not None and worker.info.fingerprint not in kinds:
            return False
        return self.passage.admits(worker, role) and has_room(worker, role, self.demand)

    def _placed(self, decode: Worker, prefill: Worker) -> Placement:
        demand, preference = self.demand, self.demand.preference
        held = held_tokens(demand, prefill)
        own = _uncomputed(demand, held)
        handoff = 0.0 if prefill is decode else HANDOFF_SECONDS
        needed = demand.query.prompt_tokens + demand.output_tokens
        wait = prefill.wait_seconds(own) + decode.room_seconds(needed, demand.output_tokens)
        return Placement(
            decode=decode,
            prefill=None if prefill is decode else prefill,
            prefill_tokens=own,
            decode_tokens=needed,
            by_session=decode.worker_id == preference.decode_id or prefill.worker_id == preference.prefill_id,
            ttft_seconds=wait + own * prefill.token_seconds + handoff,
            wait_seconds=wait,
            itl_seconds=decode.speed.itl_seconds(max(decode.report.num_running, decode.booked.requests) + 1),
            held_tokens=held,
        )


def has_room(worker: Worker, role: WorkerRole, demand: Demand) -> bool:
    """May the request be booked there. An idle worker takes any that its pool can hold."""
    booked, info = worker.booked, worker.info
    if booked.requests == 0:
        return True
    if booked.requests >= info.num_blocks:
        return False  # a live sequence holds at least one block
    decode = worker.decode_tokens + demand.query.prompt_tokens + demand.output_tokens
    if role is not WorkerRole.PREFILL and decode > MAX_DECODE_POOLS * info.pool_tokens:
        return False
    if role is WorkerRole.DECODE:
        return True
    return worker.prefill_tokens + uncached_tokens(demand, worker) <= MAX_PREFILL_POOLS * info.pool_tokens
