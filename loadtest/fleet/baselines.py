"""Routing rules of other projects as policies of the scheduler, written from their published formulas.

Each rule reads the router's view: what is reserved on a worker, its last report, and the prefix index.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count

from loadtest.fleet.machine import Machine
from loadtest.fleet.scheduler import CopyDecision, SimulatedScheduler
from loadtest.fleet.trace import BLOCK_TOKENS
from weft.fleet_types import RouteQuery
from weft.request import WorkerRole
from weft_services.scheduler.admission import NO_SLO
from weft_services.scheduler.fleet_state import ModelWorkers, Worker
from weft_services.scheduler.policy import UNRESTRICTED, BackfillWindow, RoutingInput


def kv_use(worker: Worker) -> float:
    """Return the share of the pool that prompts in flight use."""
    return min(worker.reserved.decode_tokens / worker.info.pool_tokens, 0.999)


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """A request, its cached tokens by prefill worker, and what rules need besides: the machine and random numbers."""

    query: RouteQuery
    held: dict[Worker, int]
    machine: Machine
    rng: random.Random

    def uncached(self, worker: Worker) -> int:
        """Return the tokens to compute there."""
        return max(self.query.prompt_tokens - self.held.get(worker, 0), 1)

    def wait_seconds(self, worker: Worker, tokens: int = 0) -> float:
        """Return the seconds to compute the prompts that wait there, and `tokens` more."""
        return (worker.reserved.prefill_tokens + tokens) * self.machine.prefill(2048, 4096) / 2048

    @property
    def richest(self) -> Worker | None:
        """The worker that holds the most tokens."""
        return max(self.held, key=self.held.__getitem__, default=None)

    def is_poor(self, worker: Worker, times: float) -> bool:
        """Return whether another worker holds more than `times` as many tokens."""
        return max(self.held.values(), default=0) > times * self.held.get(worker, 0)

    def least(self, workers: Sequence[Worker], cost: Callable[[Worker], float]) -> Worker:
        """Return the cheapest worker; ties are drawn at random, as most routers do after a random or rotating start."""
        values = [cost(worker) for worker in workers]
        best = min(values)
        tied = [worker for worker, value in zip(workers, values, strict=True) if value <= best]
        return tied[0] if len(tied) == 1 else self.rng.choice(tied)


# the paper leaves the ratio open; 1, 1.5, 2 and 4 give the same results here
COPY_RATIO = 1.0
Rule = Callable[[Sequence[Worker], RoutedRequest], Worker]


class Baseline:
    """A policy with a rule for prefill and one for decode; a single rule serves both.

    With `copies` the prefill worker copies missing blocks from the worker that holds most, if that holds `copies` times
    as much.
    """

    def __init__(
        self, machine: Machine, seed: int, prefill: Rule, decode: Rule | None = None, copies: float = 0.0
    ) -> None:
        self._machine = machine
        self._rng = random.Random(seed)
        self._copies = copies
        self._prefill_rule, self._decode_rule = prefill, decode or prefill

    def choose(
        self, members: ModelWorkers, routing: RoutingInput, now: float, window: BackfillWindow = UNRESTRICTED
    ) -> CopyDecision:
        """Apply the rules."""
        found = routing.prefixes.held.items()
        held = {worker: tokens for worker, tokens in found if worker.info.role is not WorkerRole.DECODE}
        asked = RoutedRequest(routing.query, held, self._machine, self._rng)
        prefill = self._prefill_rule(members.prefills, asked)
        is_both = prefill.info.role is WorkerRole.BOTH
        decode = prefill if is_both else self._decode_rule(members.decodes, asked)
        source = asked.richest if self._copies and asked.is_poor(prefill, self._copies) else None
        return CopyDecision(
            decode=decode,
            prefill=None if is_both else prefill,
            prefill_tokens=asked.uncached(source or prefill),
            decode_tokens=routing.query.prompt_tokens,
            source=source,
        )


def _requests(worker: Worker) -> float:
    return worker.reserved.requests


def least_requests(workers: Sequence[Worker], asked: RoutedRequest) -> Worker:
    """Fewest requests in flight."""
    return asked.least(workers, _requests)


def random_worker(workers: Sequence[Worker], asked: RoutedRequest) -> Worker:
    """A random worker."""
    return asked.rng.choice(workers)


def power_of_two(workers: Sequence[Worker], asked: RoutedRequest) -> Worker:
    """The less loaded of two random workers."""
    return min(asked.rng.sample(workers, min(2, len(workers))), key=_requests)


def round_robin() -> Rule:
    """The workers in rotation, separately for each role."""
    turns: dict[WorkerRole, count[int]] = {}

    def rule(workers: Sequence[Worker], asked: RoutedRequest) -> Worker:
        turn = next(turns.setdefault(workers[0].info.role, count()))
        return workers[turn % len(workers)]

    return rule


def prefix_hash(workers: Sequence[Worker], asked: RoutedRequest) -> Worker:
    """The first block's hash is a position on a ring; the next worker with at most 1.25 times its share."""
    key = asked.query.block_keys[0] if asked.query.block_keys else int(asked.query.key.request_id).to_bytes(8)
    place = int.from_bytes(blake2b(key, digest_size=8).digest()) % len(workers)
    limit = 1.25 * (sum(worker.reserved.requests for worker in workers) + 1) / len(workers)
    around = [*workers[place:], *workers[:place]]
    return next((worker for worker in around if worker.reserved.requests + 1 <= limit), around[0])


def sglang(workers: Sequence[Worker], asked: RoutedRequest) -> Worker:
    """SMG cache_aware: least load if unbalanced, else the best match above one half, else least load."""
    counts = [worker.reserved.requests for worker in workers]
    is_unbalanced = max(counts) - min(counts) > 32 and max(counts) > 1.1 * min(counts)
    if not is_unbalanced and asked.held:
        best = max(asked.held, key=lambda worker: (asked.held[worker], -worker.reserved.requests))
        if asked.held[best] > 0.5 * asked.query.prompt_tokens:
            return best
    return least_requests(workers, asked)


def sglang_least_load(workers: Sequence[Worker], asked: RoutedRequest) -> Worker:
    """SMG least_load: seconds of uncached waiting tokens, plus lambda k / (1 - k)."""
    return asked.least(
        workers, lambda worker: asked.wait_seconds(worker) + 0.15 * kv_use(worker) / (1 - kv_use(worker))
    )


def vllm(workers: Sequence[Worker], asked: RoutedRequest) -> Worker:
    """vLLM's data-parallel balancer: requests in flight or reported, plus waiting ones if its pool is past half."""

    def score(worker: Worker) -> float:
        reported = worker.report.num_waiting + worker.report.num_running
        return max(worker.reserved.requests, reported) + 6 * worker.report.num_waiting * max(0.0, kv_use(worker) - 0.5)

    return asked.least(workers, score)


def dynamo(workers: Sequence[Worker], asked: RoutedRequest) -> Worker:
    """Dynamo's KV router: blocks to compute after a credit that decays with what waits, and blocks that decode."""
    least = min(worker.reserved.prefill_tokens for worker in workers)
    own = asked.query.prompt_tokens / BLOCK_TOKENS

    def logit(worker: Worker) -> float:
        reserved = worker.reserved
        decay = 1.0 / (1.0 + ((reserved.prefill_tokens - least) / BLOCK_TOKENS) / max(own, 1e-9))
        credit = decay * asked.held.get(worker, 0) / BLOCK_TOKENS
        return max(0.0, reserved.prefill_tokens / BLOCK_TOKENS + own - credit) + reserved.decode_tokens / BLOCK_TOKENS

    return asked.least(workers, logit)


def llm_d(workers: Sequence[Worker], asked: RoutedRequest) -> Worker:
    """llm-d: weighted scores in [0, 1]: prefix match 3, queue 2, KV use 2."""
    counts = [worker.reserved.requests for worker in workers]
    low, spread = min(counts), max(counts) - min(counts)

    def score(worker: Worker) -> float:
        queue = 1.0 if not spread else 1.0 - (worker.reserved.requests - low) / spread
        prefix = asked.held.get(worker, 0) / asked.query.prompt_tokens
        return -(3 * prefix + 2 * queue + 2 * (1 - kv_use(worker)))

    return asked.least(workers, score)


def trt_llm(workers: Sequence[Worker], asked: RoutedRequest) -> Worker:
    """TensorRT-LLM kv_cache_aware: share matched less the share of 64 requests in flight."""
    return asked.least(
        workers, lambda worker: worker.reserved.requests / 64 - asked.held.get(worker, 0) / asked.query.prompt_tokens
    )


def conductor(workers: Sequence[Worker], asked: RoutedRequest) -> Worker:
    """Mooncake's Conductor (FAST'25, algorithm 1) without its copies: least predicted time to the first token."""
    return asked.least(workers, lambda worker: asked.wait_seconds(worker, asked.uncached(worker)))


def copying_conductor(workers: Sequence[Worker], asked: RoutedRequest) -> Worker:
    """Mooncake's Conductor with its copies: a worker that lacks much of a prefix copies it, which takes time."""
    richest = asked.richest

    def seconds(worker: Worker) -> float:
        if richest is None or not asked.is_poor(worker, COPY_RATIO):
            return asked.wait_seconds(worker, asked.uncached(worker))
        copied = asked.held[richest] - asked.held.get(worker, 0)
        computed = asked.wait_seconds(worker, asked.uncached(richest))
        return computed + copied * asked.machine.store_token

    return asked.least(workers, seconds)


def aibrix(workers: Sequence[Worker], asked: RoutedRequest) -> Worker:
    """AIBrix prefix-cache: least requests when more than 8 apart, else the best match that is not above the mean."""
    counts = [worker.reserved.requests for worker in workers]
    mean = sum(counts) / len(counts)
    if max(counts) - min(counts) <= 8:
        for worker in sorted(asked.held, key=lambda worker: -asked.held[worker]):
            if worker.reserved.requests <= mean + 1:
                return worker
    return least_requests(workers, asked)


def baselines(machine: Machine, seed: int = 0) -> list[SimulatedScheduler]:
    """Return a scheduler with each of the rules; ties are drawn by `seed`."""
    rules: dict[str, tuple[Rule, Rule | None]] = {
        "random": (random_worker, None),
        "round robin": (round_robin(), None),
        "least requests": (least_requests, None),
        "power of two": (power_of_two, None),
        "prefix hash": (prefix_hash, least_requests),
        "vLLM balancer": (vllm, None),
        "SGLang cache-aware": (sglang, least_requests),
        "SGLang least-load": (sglang_least_load, least_requests),
        "Dynamo KV": (dynamo, least_requests),
        "llm-d": (llm_d, least_requests),
        "TensorRT-LLM": (trt_llm, least_requests),
        "AIBrix prefix": (aibrix, least_requests),
        "Mooncake without copies": (conductor, least_requests),
        "Mooncake conductor": (copying_conductor, least_requests),
    }
    return [
        SimulatedScheduler(
            name,
            policy=Baseline(machine, seed, *pair, copies=COPY_RATIO if name == "Mooncake conductor" else 0.0),
            targets=NO_SLO,
        )
        for name, pair in rules.items()
    ]
