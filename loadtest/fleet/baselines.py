"""Routing rules of other projects behind the simulator's `Policy`, written from their published formulas.

Each rule knows at once and exactly what it dispatched and what has ended. Rules that look at caches use the same
approximate prefix index as Weft.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count

from loadtest.fleet.simulator import Chosen, Rejected
from loadtest.fleet.trace import BLOCK_TOKENS, Request
from loadtest.fleet.worker import BlockCache, Job, SimulatedWorker
from weft_services.scheduler.prefix_index import PrefixIndex


@dataclass(slots=True, eq=False)
class RouterLoad:
    """What a router knows about one worker: requests and tokens in flight, uncomputed tokens, its last report."""

    worker: SimulatedWorker
    requests: int = 0
    prompt_tokens: int = 0
    kv_tokens: int = 0
    reported_waiting: int = 0
    reported_running: int = 0

    @property
    def kv_use(self) -> float:
        """Used share of the pool."""
        return min(self.kv_tokens / self.worker.machine.kv_tokens, 0.999)

    @property
    def seconds_a_token(self) -> float:
        """Seconds to compute a prompt token."""
        return self.worker.machine.prefill(2048, 4096) / 2048


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """A request, and its cached tokens by worker as far as the router knows."""

    request: Request
    held: dict[RouterLoad, int]

    def uncached(self, load: RouterLoad) -> int:
        """Return the tokens to compute there."""
        return max(self.request.prompt_tokens - self.held.get(load, 0), 1)

    @property
    def richest(self) -> RouterLoad | None:
        """The worker that holds the most tokens."""
        return max(self.held, key=self.held.__getitem__, default=None)

    def is_poor(self, load: RouterLoad, times: float) -> bool:
        """Return whether another worker holds more than `times` as many tokens."""
        return max(self.held.values(), default=0) > times * self.held.get(load, 0)


# the paper leaves the ratio open; 1, 1.5, 2 and 4 give the same results here
COPY_RATIO = 1.0
Rule = Callable[[Sequence[RouterLoad], RoutedRequest], RouterLoad]


class Baseline:
    """A rule for prefill and one for decode; a single rule serves both.

    With `copies` the prefill worker copies missing blocks from the worker that holds most, if that holds `copies` times
    as much.
    """

    def __init__(
        self, name: str, prefill: Rule, decode: Rule | None = None, sees_caches: bool = False, copies: float = 0.0
    ) -> None:
        self.name = name
        self.seed = 0
        self._copies = copies
        self._prefill_rule, self._decode_rule = prefill, decode or prefill
        self._index: PrefixIndex[RouterLoad] | None = PrefixIndex() if sees_caches else None
        self._prefills: list[RouterLoad] = []
        self._decodes: list[RouterLoad] = []
        self._loads: list[RouterLoad] = []
        self._uncached: dict[int, int] = {}

    def start(self, workers: Sequence[SimulatedWorker], store: BlockCache | None) -> None:
        """Receive the fleet, and seed the random numbers."""
        _rng.seed(self.seed)
        self._loads = [RouterLoad(worker) for worker in workers]
        self._prefills = [load for load in self._loads if load.worker.role != "decode"]
        self._decodes = [load for load in self._loads if load.worker.role != "prefill"]

    def place(self, request: Request, now: float) -> Chosen | Rejected:
        """Apply the rules."""
        matched = self._index.match(request.keys) if self._index is not None else {}
        asked = RoutedRequest(request, {load: blocks * BLOCK_TOKENS for load, blocks in matched.items()})
        prefill = self._prefill_rule(self._prefills, asked)
        decode = prefill if prefill.worker.role == "both" else self._decode_rule(self._decodes, asked)
        source = asked.richest if self._copies and asked.is_poor(prefill, self._copies) else None
        self._uncached[request.number] = asked.uncached(source or prefill)
        prefill.prompt_tokens += asked.uncached(source or prefill)
        for load in {prefill, decode}:
            load.requests += 1
        decode.kv_tokens += request.prompt_tokens
        if self._index is not None:
            self._index.add(prefill, request.keys, matched.get(prefill, 0), prefill.worker.cache.capacity)
        return Chosen(prefill.worker, decode.worker, source.worker if source else None)

    def first_token(self, job: Job, now: float) -> None:
        """Release the prompt's load."""
        prefill = self._loads[job.prefill.slot]
        prefill.prompt_tokens -= self._uncached.pop(job.request.number)
        if job.prefill is not job.decode:
            prefill.requests -= 1

    def ended(self, job: Job, now: float) -> None:
        """Release the rest of the load."""
        decode = self._loads[job.decode.slot]
        decode.requests -= 1
        decode.kv_tokens -= job.request.prompt_tokens

    def report(self, worker: SimulatedWorker, now: float) -> None:
        """Store the reported queue lengths."""
        load = self._loads[worker.slot]
        load.reported_waiting = max(len(worker.prompts) - 1, 0) + len(worker.waiting)
        load.reported_running = len(worker.batch) + min(len(worker.prompts), 1)


def _least(loads: Sequence[RouterLoad], cost: Callable[[RouterLoad], float]) -> RouterLoad:
    """Return the cheapest worker; ties are drawn at random, as most routers do after a random or rotating start."""
    values = [cost(load) for load in loads]
    best = min(values)
    tied = [load for load, value in zip(loads, values, strict=True) if value <= best]
    return tied[0] if len(tied) == 1 else _rng.choice(tied)


_rng = random.Random()


def _requests(load: RouterLoad) -> float:
    return load.requests


def least_requests(loads: Sequence[RouterLoad], asked: RoutedRequest) -> RouterLoad:
    """Fewest requests in flight."""
    return _least(loads, _requests)


def random_worker(loads: Sequence[RouterLoad], asked: RoutedRequest) -> RouterLoad:
    """A random worker."""
    return _rng.choice(loads)


def power_of_two(loads: Sequence[RouterLoad], asked: RoutedRequest) -> RouterLoad:
    """The less loaded of two random workers."""
    return min(_rng.sample(loads, min(2, len(loads))), key=_requests)


def round_robin() -> Rule:
    """The workers in rotation, separately for each role."""
    turns: dict[str, count[int]] = {}

    def rule(loads: Sequence[RouterLoad], asked: RoutedRequest) -> RouterLoad:
        turn = next(turns.setdefault(loads[0].worker.role, count()))
        return loads[turn % len(loads)]

    return rule


def prefix_hash(loads: Sequence[RouterLoad], asked: RoutedRequest) -> RouterLoad:
    """The first block's hash is a position on a ring; the next worker with at most 1.25 times its share."""
    key = asked.request.keys[0] if asked.request.keys else asked.request.number.to_bytes(8)
    place = int.from_bytes(blake2b(key, digest_size=8).digest()) % len(loads)
    limit = 1.25 * (sum(load.requests for load in loads) + 1) / len(loads)
    around = [*loads[place:], *loads[:place]]
    return next((load for load in around if load.requests + 1 <= limit), around[0])


def sglang(loads: Sequence[RouterLoad], asked: RoutedRequest) -> RouterLoad:
    """SMG cache_aware: least load if unbalanced, else the best match above one half, else least load."""
    counts = [load.requests for load in loads]
    is_unbalanced = max(counts) - min(counts) > 32 and max(counts) > 1.1 * min(counts)
    if not is_unbalanced and asked.held:
        best = max(asked.held, key=lambda load: (asked.held[load], -load.requests))
        if asked.held[best] > 0.5 * asked.request.prompt_tokens:
            return best
    return least_requests(loads, asked)


def sglang_least_load(loads: Sequence[RouterLoad], asked: RoutedRequest) -> RouterLoad:
    """SMG least_load: seconds of uncached waiting tokens, plus lambda k / (1 - k)."""
    return _least(
        loads, lambda load: load.prompt_tokens * load.seconds_a_token + 0.15 * load.kv_use / (1 - load.kv_use)
    )


def vllm(loads: Sequence[RouterLoad], asked: RoutedRequest) -> RouterLoad:
    """vLLM's data-parallel balancer: requests in flight or reported, plus waiting ones if its pool is past half."""

    def score(load: RouterLoad) -> float:
        reported = load.reported_waiting + load.reported_running
        return max(load.requests, reported) + 6 * load.reported_waiting * max(0.0, load.kv_use - 0.5)

    return _least(loads, score)


def dynamo(loads: Sequence[RouterLoad], asked: RoutedRequest) -> RouterLoad:
    """Dynamo's KV router: blocks to compute after a credit that decays with what waits, and blocks that decode."""
    least = min(load.prompt_tokens for load in loads)
    own = asked.request.prompt_tokens / BLOCK_TOKENS

    def logit(load: RouterLoad) -> float:
        decay = 1.0 / (1.0 + ((load.prompt_tokens - least) / BLOCK_TOKENS) / max(own, 1e-9))
        credit = decay * asked.held.get(load, 0) / BLOCK_TOKENS
        return max(0.0, load.prompt_tokens / BLOCK_TOKENS + own - credit) + load.kv_tokens / BLOCK_TOKENS

    return _least(loads, logit)


def llm_d(loads: Sequence[RouterLoad], asked: RoutedRequest) -> RouterLoad:
    """llm-d: weighted scores in [0, 1]: prefix match 3, queue 2, KV use 2."""
    counts = [load.requests for load in loads]
    low, spread = min(counts), max(counts) - min(counts)

    def score(load: RouterLoad) -> float:
        queue = 1.0 if not spread else 1.0 - (load.requests - low) / spread
        prefix = asked.held.get(load, 0) / asked.request.prompt_tokens
        return -(3 * prefix + 2 * queue + 2 * (1 - load.kv_use))

    return _least(loads, score)


def trt_llm(loads: Sequence[RouterLoad], asked: RoutedRequest) -> RouterLoad:
    """TensorRT-LLM kv_cache_aware: share matched less the share of 64 requests in flight."""
    return _least(loads, lambda load: load.requests / 64 - asked.held.get(load, 0) / asked.request.prompt_tokens)


def conductor(loads: Sequence[RouterLoad], asked: RoutedRequest) -> RouterLoad:
    """Mooncake's Conductor (FAST'25, algorithm 1) without its copies: least predicted time to the first token."""
    return _least(loads, lambda load: (load.prompt_tokens + asked.uncached(load)) * load.seconds_a_token)


def copying_conductor(loads: Sequence[RouterLoad], asked: RoutedRequest) -> RouterLoad:
    """Mooncake's Conductor with its copies: a worker that lacks much of a prefix copies it, which takes time."""
    richest = asked.richest

    def seconds(load: RouterLoad) -> float:
        if richest is None or not asked.is_poor(load, COPY_RATIO):
            return (load.prompt_tokens + asked.uncached(load)) * load.seconds_a_token
        copied = asked.held[richest] - asked.held.get(load, 0)
        computed = (load.prompt_tokens + asked.uncached(richest)) * load.seconds_a_token
        return computed + copied * load.worker.machine.store_token

    return _least(loads, seconds)


def aibrix(loads: Sequence[RouterLoad], asked: RoutedRequest) -> RouterLoad:
    """AIBrix prefix-cache: least requests when more than 8 apart, else the best match that is not above the mean."""
    counts = [load.requests for load in loads]
    mean = sum(counts) / len(counts)
    if max(counts) - min(counts) <= 8:
        for load in sorted(asked.held, key=lambda load: -asked.held[load]):
            if load.requests <= mean + 1:
                return load
    return least_requests(loads, asked)


def baselines(seed: int = 0) -> list[Baseline]:
    """Return a fresh policy of each kind; ties are drawn by `seed`."""
    policies = [
        Baseline("random", random_worker),
        Baseline("round robin", round_robin()),
        Baseline("least requests", least_requests),
        Baseline("power of two", power_of_two),
        Baseline("prefix hash", prefix_hash, least_requests),
        Baseline("vLLM balancer", vllm),
        Baseline("SGLang cache-aware", sglang, least_requests, sees_caches=True),
        Baseline("SGLang least-load", sglang_least_load, least_requests, sees_caches=True),
        Baseline("Dynamo KV", dynamo, least_requests, sees_caches=True),
        Baseline("llm-d", llm_d, least_requests, sees_caches=True),
        Baseline("TensorRT-LLM", trt_llm, least_requests, sees_caches=True),
        Baseline("AIBrix prefix", aibrix, least_requests, sees_caches=True),
        Baseline("Mooncake without copies", conductor, least_requests, sees_caches=True),
        Baseline("Mooncake conductor", copying_conductor, least_requests, sees_caches=True, copies=COPY_RATIO),
    ]
    for policy in policies:
        policy.seed = seed
    return policies
