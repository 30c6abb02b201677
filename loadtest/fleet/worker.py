"""A simulated worker: a prompt queue and a decode batch, as one flow between events, and a block cache.

Between two events every running sequence gets one token per step and one prompt gets a chunk, as the engine plans its
steps. With several waiting prompts the choice is repeated after every chunk. Step times change only at events, so a
worker costs a few events per request, however long its answer.
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
    """Cache of blocks, least recently used out first. Later blocks of a prompt count as older than its first ones."""

    def __init__(self, capacity: int) -> None:
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        self.capacity = capacity

    def __len__(self) -> int:
        return len(self._keys)

    def match(self, keys: Sequence[bytes]) -> int:
        """Return how many leading keys are cached."""
        for depth, key in enumerate(keys):
            if key not in self._keys:
                return depth
        return len(keys)

    def put(self, keys: Sequence[bytes]) -> None:
        """Add all keys, the first one newest."""
        for key in reversed(keys):
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self.capacity:
            self._keys.popitem(last=False)


@dataclass(slots=True, eq=False)
class Job:
    """A request in progress."""

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
        """Tokens it needs on the decode worker."""
        return self.request.prompt_tokens + self.request.output_tokens


@dataclass(slots=True)
class Finished:
    """What ended on a worker: computed prompts, completed answers."""

    computed: list[Job] = field(default_factory=list)
    ended: list[Job] = field(default_factory=list)


class SimulatedWorker:
    """One worker. Call `advance` first at every new time, at the latest at `next_at`."""

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
        self.generating_sequences = 0.0
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
        """True while it has a step to do."""
        return self._step > 0.0

    def beside(self, others: int) -> None:
        """Set how many other workers are busy on the same machine."""
        self.others = others
        self._plan()

    def admit(self, job: Job) -> bool:
        """Reserve room for prompt and answer; False if the job must wait."""
        if self.waiting or (self.reserved_tokens and self.reserved_tokens + job.held_tokens > self.machine.kv_tokens):
            self.waiting.append(job)
            return False
        self.reserved_tokens += job.held_tokens
        return True

    def admit_waiting(self) -> list[Job]:
        """Admit and return the waiting jobs that fit now."""
        admitted = []
        while self.waiting and (
            not self.reserved_tokens or self.reserved_tokens + self.waiting[0].held_tokens <= self.machine.kv_tokens
        ):
            self.reserved_tokens += self.waiting[0].held_tokens
            admitted.append(self.waiting.popleft())
        return admitted

    def fetch(self, job: Job, store: BlockCache | None) -> float:
        """Look up the prompt's cached blocks and fetch missing ones from `store`; return when they are here.

        Prompts are computed meanwhile; fetches run one after another.
        """
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
        """Queue the rest of the prompt for prefill."""
        tokens = _uncached(job)
        job.chunk = min(tokens, self.machine.chunk_tokens)
        job.steps = tokens / job.chunk
        job.queued_at = self._now
        self.prompts.append(job)
        self._plan()

    def generate(self, job: Job) -> None:
        """Start decoding after the first token, one token per step."""
        turns = self._turns + job.request.output_tokens - 1
        heapq.heappush(self.batch, (turns, job.request.number, job))
        self.held_tokens += job.request.prompt_tokens
        self._plan()

    def advance(self, now: float) -> Finished:
        """Advance to `now`; return what ended."""
        finished = Finished()
        if self._step > 0.0:
            self.busy_seconds += now - self._now
            self._turn((now - self._now) / self._step)
        self._now = now
        while self.prompts and self.prompts[0].steps <= EPSILON:
            job = self.prompts.pop(0)
            self.queued_tokens -= _uncached(job)
            self.cache.put(job.request.keys)
            finished.computed.append(job)
        while self.batch and self.batch[0][0] <= self._turns + EPSILON:
            finished.ended.append(self._end(heapq.heappop(self.batch)[2]))
        self._plan()
        return finished

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
            self.generating_sequences += tokens
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
        """Prefill priority, as in the engine's wait queue."""
        waited = self._now - job.queued_at
        return waited / (job.steps * job.chunk) if waited <= LEVEL_SECONDS else float("inf")


def _uncached(job: Job) -> int:
    return job.request.prompt_tokens - job.cached_tokens - job.stored_tokens
