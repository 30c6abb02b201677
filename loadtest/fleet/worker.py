"""A simulated worker: a queue of prompts and a batch that generates, as one flow between events, and a block cache.

Between two events every running sequence gets one token a step and one prompt of the queue a chunk, as the engine
plans its steps; which one is looked at again after every chunk while several wait. A step's length changes only at
events, so a worker costs a few events a request, whatever it generates.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from loadtest.fleet.machine import Machine
from loadtest.fleet.trace import BLOCK_TOKENS, Request
from weft.engine.wait_queue import LEVEL_SECONDS

EPSILON = 1e-9


class BlockCache:
    """Least recently used out first. A prompt's later blocks are older than its first ones."""

    def __init__(self, capacity: int) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        self.capacity = capacity

    def __len__(self) -> int:
        return len(self._keys)

    def match(self, keys: Sequence[bytes]) -> int:
        """How many of the first ones are there."""
        for depth, key in enumerate(keys):
            if key not in self._keys:
                return depth
        return len(keys)

    def put(self, keys: Sequence[bytes]) -> None:
        """All of them, newest first."""
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self.capacity:
            self._keys.popitem(last=False)


@dataclass(slots=True, eq=False)
class Job:
    """A request under way."""

    request: Request
    decode: SimulatedWorker
    prefill: SimulatedWorker
    source: SimulatedWorker | None = None
    cached_tokens: int = 0
    stored_tokens: int = 0
    chunk: float = 0.0
    steps: float = 0.0
    queued_at: float = 0.0
    first_token_at: float = 0.0
    ended_at: float = 0.0

    @property
    def held_tokens(self) -> int:
        """What it needs on the worker that decodes it."""
        return self.request.prompt_tokens + self.request.output_tokens


@dataclass(slots=True)
class Finished:
    """What has come to its end on a worker: prompts computed, answers ended."""

    computed: list[Job] = field(default_factory=list)
    ended: list[Job] = field(default_factory=list)


class SimulatedWorker:
    """One worker. Call `advance` before anything else at a new time; `next_at` is when it has to be called at the
    latest."""

    def __init__(self, slot: int, role: str, machine: Machine, cache_blocks: int) -> None:
        self.slot = slot
        self.role = role
        self.machine = machine
        self.cache = BlockCache(cache_blocks)
        self.next_at = float("inf")
        self.version = 0
        self.busy_seconds = 0.0
        self.computed_tokens = 0.0
        self.generated_tokens = 0.0
        self.generating_steps = 0.0
        self.generating_seconds = 0.0
        self.computing_seconds = 0.0
        self.fetched_tokens = 0
        self.fetching_seconds = 0.0
        self.held_tokens = 0.0
        self.reserved_tokens = 0
        self.queued_tokens = 0
        self.others = 0
        self.itl: dict[int, float] = {}
        self.prompts: list[Job] = []
        self.batch: list[tuple[float, int, Job]] = []
        self.waiting: deque[Job] = deque()
        self._now = 0.0
        self._turns = 0.0
        self._step = 0.0
        self._fetching_until = 0.0

    @property
    def is_busy(self) -> bool:
        """It has a step to do."""
        return self._step > 0.0

    def beside(self, others: int) -> None:
        """So many others are at work on the same machine from now on."""
        self.others = others
        self._plan()

    def admit(self, job: Job) -> bool:
        """Hold room for its prompt and answer; False: it waits its turn."""
        if self.waiting or (self.reserved_tokens and self.reserved_tokens + job.held_tokens > self.machine.kv_tokens):
            self.waiting.append(job)
            return False
        self.reserved_tokens += job.held_tokens
        return True

    def admit_waiting(self) -> list[Job]:
        """Those for whom there is room now."""
        admitted = []
        while self.waiting and (
            not self.reserved_tokens or self.reserved_tokens + self.waiting[0].held_tokens <= self.machine.kv_tokens
        ):
            self.reserved_tokens += self.waiting[0].held_tokens
            admitted.append(self.waiting.popleft())
        return admitted

    def fetch(self, job: Job, store: BlockCache | None) -> float:
        """A prompt has come: look up what is cached of it, and get what is in `store`, a cache elsewhere. Returns when
        all of that is here. Prompts are computed meanwhile; fetches take turns."""
        request = job.request
        most = request.prompt_tokens - 1
        depth = self.cache.match(request.keys)
        job.cached_tokens = min(depth * BLOCK_TOKENS, most)
        if store is not None:
            found = depth + store.match(request.keys[depth:])
            job.stored_tokens = min(found * BLOCK_TOKENS, most) - job.cached_tokens
        self.queued_tokens += _uncached(job)
        if not job.stored_tokens:
            return self._now
        seconds = self.machine.store_token * job.stored_tokens
        self._fetching_until = max(self._fetching_until, self._now) + seconds
        self.fetched_tokens += job.stored_tokens
        self.fetching_seconds += seconds
        return self._fetching_until

    def enqueue(self, job: Job) -> None:
        """What is left of the prompt is to be computed, beside those that wait."""
        tokens = _uncached(job)
        job.chunk = min(tokens, self.machine.chunk_tokens)
        job.steps = tokens / job.chunk
        job.queued_at = self._now
        self.prompts.append(job)
        self._plan()

    def generate(self, job: Job) -> None:
        """It has its first token; the others come one a step."""
        turns = self._turns + job.request.output_tokens - 1
        heapq.heappush(self.batch, (turns, job.request.number, job))
        self.held_tokens += job.request.prompt_tokens
        self._plan()

    def advance(self, now: float) -> Finished:
        """Let time pass."""
        told = Finished()
        if self._step > 0.0:
            self.busy_seconds += now - self._now
            self._turn((now - self._now) / self._step)
        self._now = now
        while self.prompts and self.prompts[0].steps <= EPSILON:
            job = self.prompts.pop(0)
            self.queued_tokens -= _uncached(job)
            self.cache.put(job.request.keys)
            told.computed.append(job)
        while self.batch and self.batch[0][0] <= self._turns + EPSILON:
            told.ended.append(self._end(heapq.heappop(self.batch)[2]))
        self._plan()
        return told

    def _turn(self, turns: float) -> None:
        self._turns += turns
        if self.prompts:
            chunk = self.prompts[0].chunk
            self.prompts[0].steps -= turns
            self.computed_tokens += turns * chunk
            self.computing_seconds += turns * self._step * chunk / (chunk + len(self.batch))
        if self.batch:
            self.generating_steps += turns
            self.generating_seconds += turns * self._step
            tokens = turns * len(self.batch)
            self.held_tokens += tokens
            self.generated_tokens += tokens
            bucket = round(self._step * 10_000)
            self.itl[bucket] = self.itl.get(bucket, 0.0) + tokens

    def _end(self, job: Job) -> Job:
        self.held_tokens -= job.request.prompt_tokens + job.request.output_tokens - 1
        self.reserved_tokens -= job.held_tokens
        if not self.batch:
            self.held_tokens = 0.0
        self.cache.put(job.request.keys)
        return job

    def _plan(self) -> None:
        self.version += 1
        self._step, turns = 0.0, float("inf")
        if len(self.prompts) > 1:
            neediest = max(self.prompts, key=self._need)
            self.prompts.remove(neediest)
            self.prompts.insert(0, neediest)
        if self.prompts or self.batch:
            chunk = context = 0.0
            if self.prompts:
                job = self.prompts[0]
                chunk, turns = job.chunk, job.steps if len(self.prompts) == 1 else min(job.steps, 1.0)
                context = (job.cached_tokens + job.stored_tokens + job.request.prompt_tokens) / 2
            self._step = self.machine.step(len(self.batch), self.held_tokens, chunk, context, self.others)
            if self.batch:
                turns = min(turns, self.batch[0][0] - self._turns)
        self.next_at = self._now + max(turns, 0.0) * self._step if self._step else float("inf")

    def _need(self, job: Job) -> float:
        """As in `weft.engine.wait_queue`."""
        waited = self._now - job.queued_at
        return waited / (job.steps * job.chunk) if waited <= LEVEL_SECONDS else float("inf")


def _uncached(job: Job) -> int:
    return job.request.prompt_tokens - job.cached_tokens - job.stored_tokens
