"""Where a request goes: pure functions over plain state, with the clock passed in. Books nothing, waits for nothing.

    cost(worker) = tokens in flight / its rate + LAMBDA_SECONDS * k / (1 - k),   k = share of its KV pool in use

The cheapest wins; near ties go to the worker with the fewest bookings, then to the one chosen longest ago. A session's
workers win over cheaper ones until the queue before them costs more than its cache can save.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from weft.errors import InvalidRequest, NotFound, Overloaded, PeerLost
from weft.request import WorkerRole
from weft_services.scheduler.state import NO_PREFERENCE, Placement, Preference, RouteQuery, Worker

# cheap until the pool is nearly full, then steep: the shape of a queueing delay
LAMBDA_SECONDS = 0.15
# tokens a second, until a worker's reports or its peers' say better
DEFAULT_PREFILL_RATE = 2000.0
DEFAULT_DECODE_RATE = 1000.0
# costs this close are noise in the rates: spreading is worth more
TIE_SHARE = 0.1
TIE_SECONDS = 0.005
# how much longer than elsewhere a session waits for its own worker, beyond what recomputing its prompt costs
PATIENCE_SECONDS = 1.0
# what moving blocks to another worker costs; decides for computing a prompt where it decodes
HANDOFF_SECONDS = 0.01
# answers are mostly shorter than the most they may be
EXPECTED_OUTPUT_TOKENS = 256
# bookings a worker takes, in pools: running and waiting for decode; prompts waiting hold no blocks
MAX_DECODE_POOLS = 2
MAX_PREFILL_POOLS = 4
MAX_RETRY_SECONDS = 30.0

Cost = Callable[[Worker], float]


def choose(
    models: Mapping[str, Collection[Worker]],
    query: RouteQuery,
    now: float,
    preference: Preference = NO_PREFERENCE,
) -> Placement:
    """Where the request goes. `models`: every model ever served and its live workers.

    Raises PeerLost, Overloaded, NotFound or InvalidRequest, having changed nothing.
    """
    if models and query.model not in models:
        raise NotFound(f"no worker serves the model {query.model!r}")
    served = models.get(query.model, ())
    decodes = _able(served, WorkerRole.DECODE, query, now)
    prefills = _able(served, WorkerRole.PREFILL, query, now)
    decodes = _with_partner(decodes, prefills)
    decode_tokens = query.prompt_tokens + min(query.max_tokens, EXPECTED_OUTPUT_TOKENS)
    decode_cost = _decode_cost(decodes, decode_tokens)
    roomy = [w for w in decodes if _has_room(w, w.decode_tokens + decode_tokens, MAX_DECODE_POOLS)]
    if not roomy:
        raise Overloaded("every decode worker is full", _retry_after(decodes, decode_cost))
    decode = _pick(roomy, decode_cost, preference.decode_id, _saving(prefills, query))
    prefill = _choose_prefill(prefills, decode, query, preference.prefill_id)
    return Placement(
        decode=decode,
        prefill=None if prefill is decode else prefill,
        prefill_tokens=query.prompt_tokens,
        decode_tokens=decode_tokens,
        by_session=decode.worker_id == preference.decode_id or prefill.worker_id == preference.prefill_id,
    )


def _choose_prefill(prefills: Sequence[Worker], decode: Worker, query: RouteQuery, preferred_id: str) -> Worker:
    fitting = [worker for worker in prefills if worker.info.fingerprint == decode.info.fingerprint]
    cost = _prefill_cost(fitting, query.prompt_tokens, decode)
    roomy = [w for w in fitting if _has_room(w, w.prefill_tokens + query.prompt_tokens, MAX_PREFILL_POOLS)]
    if not roomy:
        raise Overloaded("every prefill worker is full", _retry_after(fitting, cost))
    return _pick(roomy, cost, preferred_id, _saving(fitting, query))


def _able(served: Iterable[Worker], role: WorkerRole, query: RouteQuery, now: float) -> list[Worker]:
    """Workers that can take this request in that role; ones that have just failed only when there is no other."""
    live = [worker for worker in served if worker.info.role.can(role)]
    tried = [worker for worker in live if not query.excludes(worker)]
    ready = [worker for worker in tried if worker.report.ready]
    if not ready and any(worker.report.is_full for worker in tried):
        raise Overloaded(f"every {role} worker's pool is full")
    if not ready:
        state = "ready" if live else "live"
        raise PeerLost(f"no {role} worker of {query.model!r} is {state}")
    longest = max(_longest_prompt(worker) for worker in ready)
    if query.prompt_tokens > longest:
        message = f"the prompt has {query.prompt_tokens} tokens; at most {longest} fit"
        raise InvalidRequest(message, "prompt", "context_length_exceeded")
    fitting = [worker for worker in ready if query.prompt_tokens <= _longest_prompt(worker)]
    return [worker for worker in fitting if worker.suspect_until <= now] or fitting


def _longest_prompt(worker: Worker) -> int:
    # the answer needs room for one token
    return min(worker.info.max_context_tokens, worker.info.pool_tokens) - 1


def _with_partner(decodes: Sequence[Worker], prefills: Sequence[Worker]) -> list[Worker]:
    """Decode workers whose blocks some prefill worker can fill; during an upgrade two kinds may be live."""
    kinds = {worker.info.fingerprint for worker in prefills}
    matched = [worker for worker in decodes if worker.info.fingerprint in kinds]
    if not matched:
        raise PeerLost("no prefill worker runs what the decode workers run")
    return matched


def _decode_cost(workers: Sequence[Worker], own_tokens: int) -> Cost:
    # a sequence's speed falls with load, so only its ratio to the other workers' says how fast the machine is
    speeds = [worker.decode_rate for worker in workers if worker.decode_rate]
    mean = sum(speeds) / len(speeds) if speeds else 1.0

    def cost(worker: Worker) -> float:
        rate = DEFAULT_DECODE_RATE * (worker.decode_rate or mean) / mean
        return (worker.decode_tokens + own_tokens) / rate + _kv_pressure(worker)

    return cost


def _prefill_cost(workers: Sequence[Worker], own_tokens: int, decode: Worker) -> Cost:
    mean = _mean_prefill_rate(workers)

    def cost(worker: Worker) -> float:
        handoff = 0.0 if worker is decode else HANDOFF_SECONDS
        return (worker.prefill_tokens + own_tokens) / (worker.prefill_rate or mean) + _kv_pressure(worker) + handoff

    return cost


def _kv_pressure(worker: Worker) -> float:
    return LAMBDA_SECONDS * worker.kv_use / (1.0 - worker.kv_use)


def _has_room(worker: Worker, tokens: int, max_pools: int) -> bool:
    """May it be booked up to that many tokens. An idle worker takes any request that its pool can hold."""
    if worker.booked.requests == 0:
        return True
    # a live sequence holds at least one block
    return worker.booked.requests < worker.info.num_blocks and tokens <= max_pools * worker.info.pool_tokens


def _mean_prefill_rate(workers: Sequence[Worker]) -> float:
    rates = [worker.prefill_rate for worker in workers if worker.prefill_rate]
    return sum(rates) / len(rates) if rates else DEFAULT_PREFILL_RATE


def _saving(prefills: Sequence[Worker], query: RouteQuery) -> float:
    """Seconds that a session may wait longer for its own worker than for the best one."""
    return PATIENCE_SECONDS + query.prompt_tokens / _mean_prefill_rate(prefills)


def _pick(candidates: Sequence[Worker], cost: Cost, preferred_id: str, saving: float) -> Worker:
    costs = [(cost(worker), worker) for worker in candidates]
    best = min(value for value, _ in costs)
    for value, worker in costs:
        if worker.worker_id == preferred_id and value <= best + saving:
            return worker
    tied = [worker for value, worker in costs if value <= best * (1 + TIE_SHARE) + TIE_SECONDS]
    return min(tied, key=lambda worker: (worker.booked.requests, worker.last_chosen, worker.worker_id))


def _retry_after(workers: Iterable[Worker], cost: Cost) -> float:
    """Seconds until the least loaded worker has worked off half of what is before it."""
    return min(max(min(map(cost, workers)) / 2, 1.0), MAX_RETRY_SECONDS)
