"""The engine as the event loop sees it: run a sequence, wait for its events, end it.

EngineEvents brings every step's output from the engine's thread to the loop and updates metrics. An EngineClient, one
for each role, routes the events to its sequences. GrammarCompiler makes the constraints of sequences with a grammar.
StatsRecorder counts cache hits and KV transfers for reports.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, KeysView, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Generic, TypeVar

from weft import metrics
from weft.engine.engine import Engine
from weft.engine.messages import (
    Constraint,
    EngineLoad,
    PromptProgress,
    Reserved,
    SequenceMode,
    SequenceSpec,
    StepOutput,
    TokenDelta,
)
from weft.errors import Incompatible, InvalidRequest, PeerLost, WeftError
from weft.fleet_types import NO_ENGINE_TIME, DecodedRows, PrefixCacheStats, TransferStats, WorkerStats
from weft.grammar import Grammars
from weft.kv.block_pool import FullBlock, Tier
from weft.request import Grammar, RequestKey, WorkerRole

Consumer = Callable[[StepOutput], None]
ComputeListener = Callable[[int, float], None]
WATCH_SECONDS = 0.5
metrics.init_series(metrics.ENGINE_TOKENS, ("prompt", "generated"))
# Bounds reports: prefill workers come and go under new names.
MAX_PREFILL_WORKERS = 256
metrics.init_series(metrics.PREFIX_HITS, Tier)


class EngineEvents:
    """`listener` runs on the engine's thread, everything else on the loop that created this object."""

    def __init__(self) -> None:
        # Called after each prefill-only step (first tokens included) with its token count and duration.
        self.on_computed: ComputeListener | None = None
        self.on_sealed: Callable[[Sequence[FullBlock]], None] | None = None
        self.on_cache_changes: Callable[[Mapping[bytes, bool]], None] | None = None
        self.load = EngineLoad()
        self.engine_time = NO_ENGINE_TIME
        self._loop = asyncio.get_running_loop()
        self._consumers: list[Consumer] = []
        self._broken: asyncio.Future[None] = self._loop.create_future()

    def subscribe(self, consumer: Consumer) -> None:
        """Call `consumer` with every step's output, in order, on the loop."""
        self._consumers.append(consumer)

    def listener(self, output: StepOutput) -> None:
        """Receives step outputs on the engine's thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, output)

    async def until_broken(self) -> None:
        """Raise the first exception of a consumer, which has lost events and cannot continue."""
        await asyncio.shield(self._broken)

    def _deliver(self, output: StepOutput) -> None:
        try:
            self._observe(output)
            for consumer in self._consumers:
                consumer(output)
            if self.on_sealed is not None:
                self.on_sealed(output.sealed)
            if self.on_cache_changes is not None:
                self.on_cache_changes(output.cache_changes)
        except Exception as error:
            if not self._broken.done():
                self._broken.set_exception(error)

    def _observe(self, output: StepOutput) -> None:
        before, load = self.load, output.load
        self.load = load
        if output.step_seconds:
            metrics.STEPS.inc()
            metrics.STEP_SECONDS.observe(output.step_seconds)
            self._measure(before, output)
        metrics.ENGINE_TOKENS.labels("prompt").inc(load.computed_prompt_tokens - before.computed_prompt_tokens)
        metrics.ENGINE_TOKENS.labels("generated").inc(load.generated_tokens - before.generated_tokens)
        _set_gauges(load)

    def clear(self) -> None:
        """Drop consumers and zero the gauges once the engine has stopped."""
        self._consumers.clear()
        self.on_computed = self.on_sealed = self.on_cache_changes = None
        _set_gauges(EngineLoad())

    def _measure(self, before: EngineLoad, output: StepOutput) -> None:
        num_tokens = output.load.computed_prompt_tokens - before.computed_prompt_tokens
        # A first token belongs to its prompt; sequences between two decode tokens do not wait for it.
        decoded = [delta for delta in output.deltas if delta.prompt is None and delta.token_ids]
        num_rows = len(decoded) + sum(delta.drafts.verified for delta in decoded)
        rows = DecodedRows(len(decoded), num_rows, sum(len(delta.token_ids) for delta in decoded))
        self.engine_time = self.engine_time.add(num_tokens, rows, output.step_seconds)
        if self.on_computed and num_tokens and not decoded:
            self.on_computed(num_tokens, output.step_seconds)


def _set_gauges(load: EngineLoad) -> None:
    metrics.SEQUENCES.labels("running").set(load.num_running)
    metrics.SEQUENCES.labels("waiting").set(load.num_waiting)
    metrics.BLOCKS.labels("free").set(load.free_blocks)
    metrics.BLOCKS.labels("cached").set(load.cached_blocks)
    metrics.BLOCKS.labels("active").set(load.active_blocks)
    metrics.BLOCKS.labels("quarantined").set(load.quarantined_blocks)


class EngineSequence:
    """One sequence and its events so far; roles derive their own. Open it with an EngineClient.

    Every wait raises the engine's failure, or the error given to `fail`.
    """

    def __init__(self, key: RequestKey) -> None:
        self.key = key
        self.failure: WeftError | None = None
        self.is_submitted = False
        self.has_ended = False  # the engine has released it
        self._reserved: Reserved | None = None
        self._progress: PromptProgress | None = None
        self._deltas: deque[TokenDelta] = deque()
        self._changed = asyncio.Event()

    async def until_reserved(self) -> Reserved:
        """Wait until blocks are reserved for the prompt, for a spec with `wait_for_kv`."""
        while self._reserved is None:
            await self._change()
        return self._reserved

    async def until_first_token(self) -> TokenDelta:
        async for event in self.events():
            if isinstance(event, TokenDelta):
                return event
        raise AssertionError("a sequence ends with a token or a failure")

    async def until_ended(self) -> None:
        """Wait for the last token."""
        while self.failure is not None or not self.has_ended:
            await self._change()

    async def events(self) -> AsyncIterator[TokenDelta | PromptProgress]:
        """Yield tokens, and the prompt's progress. One task may iterate at a time.

        After a slow consumer come the tokens first, then only the latest progress, which includes all earlier ones.
        """
        while True:
            if self._deltas:
                yield self._deltas.popleft()
            elif self._progress is not None:
                progress, self._progress = self._progress, None
                yield progress
            elif self.has_ended and self.failure is None:
                return
            else:
                await self._change()

    def fail(self, error: WeftError) -> None:
        """Make every wait raise `error`; the engine still holds the sequence."""
        self.failure = error
        self._changed.set()

    def on_reserved(self, reserved: Reserved) -> None:
        self._reserved = reserved
        self._changed.set()

    def on_progress(self, progress: PromptProgress) -> None:
        self._progress = progress
        self._changed.set()

    def on_delta(self, delta: TokenDelta) -> None:
        self._deltas.append(delta)
        self._changed.set()

    def on_ended(self, failure: WeftError | None = None) -> None:
        self.has_ended, self.failure = True, failure
        self._changed.set()

    async def _change(self) -> None:
        if self.failure is None:
            await self._changed.wait()
            self._changed.clear()
        if self.failure is not None:
            raise self.failure


SequenceT = TypeVar("SequenceT", bound=EngineSequence)


class EngineClient(Generic[SequenceT]):
    """The sequences of one role. Belongs to the event loop.

    - `worker_id`: names this worker in PeerLost.
    - `on_deltas`: receives all tokens of a step in one call, before any task runs. Without it, each sequence queues its
      own for `EngineSequence.events`.
    """

    def __init__(
        self,
        engine: Engine,
        events: EngineEvents,
        grammars: GrammarCompiler,
        role: WorkerRole,
        worker_id: str,
        on_deltas: Callable[[list[tuple[SequenceT, TokenDelta]]], None] | None = None,
    ) -> None:
        self._engine = engine
        self._grammars = grammars
        self._role = role
        self._worker_id = worker_id
        self._on_deltas = on_deltas
        self._sequences: dict[RequestKey, SequenceT] = {}
        self._is_open = True
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        events.subscribe(self._on_step)

    @property
    def keys(self) -> KeysView[RequestKey]:
        """Keys of all open sequences."""
        return self._sequences.keys()

    def get(self, key: RequestKey) -> SequenceT | None:
        """Return the open sequence with this key."""
        return self._sequences.get(key)

    @contextmanager
    def open(self, sequence: SequenceT) -> Iterator[None]:
        """Receive events for a sequence; the engine releases it at the end of the scope.

        Raises PeerLost after `close`, and InvalidRequest if a sequence with this key is open.
        """
        key = sequence.key
        if not self._is_open:
            raise PeerLost(f"this {self._role} worker is shutting down", self._worker_id)
        if key in self._sequences:
            raise InvalidRequest("this attempt is already running")
        self._sequences[key] = sequence
        self._is_idle.clear()
        try:
            yield
        finally:
            del self._sequences[key]
            if not self._sequences:
                self._is_idle.set()
            if sequence.is_submitted and not sequence.has_ended:
                self._engine.cancel(key)

    async def submit(self, sequence: EngineSequence, spec: SequenceSpec) -> None:
        """Compile the grammar of `spec`, which may take seconds, then run it.

        Raises InvalidRequest, Incompatible, Overloaded or EngineFailed.
        """
        may_draft = spec.speculation.is_enabled and spec.mode is SequenceMode.GENERATE
        constraint = await self._grammars.compile(spec.sampling.grammar, with_twins=may_draft)
        self._engine.submit(replace(spec, constraint=constraint))
        sequence.is_submitted = True

    def close(self) -> None:
        """Reject new sequences; open ones continue."""
        self._is_open = False

    async def until_idle(self) -> None:
        """Wait until no sequence is open."""
        await self._is_idle.wait()

    async def watch(self) -> None:
        """Fail all sequences when the engine hangs, so that callers go elsewhere. Never returns."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if self._engine.watchdog.is_hung:
                for sequence in self._sequences.values():
                    sequence.fail(PeerLost(f"the {self._role} engine hangs", self._worker_id))

    def _on_step(self, output: StepOutput) -> None:
        """Route events to their sequences; keys of other clients are ignored."""
        sequences = self._sequences
        for reserved in output.reserved:
            if sequence := sequences.get(reserved.key):
                sequence.on_reserved(reserved)
        for progress in output.progress:
            if sequence := sequences.get(progress.key):
                sequence.on_progress(progress)
        self._on_tokens([(found, delta) for delta in output.deltas if (found := sequences.get(delta.key))])
        for failure in output.failures:
            if sequence := sequences.get(failure.key):
                sequence.on_ended(failure.error)

    def _on_tokens(self, deltas: list[tuple[SequenceT, TokenDelta]]) -> None:
        if self._on_deltas is not None:
            self._on_deltas(deltas)
        for sequence, delta in deltas:
            if self._on_deltas is None:
                sequence.on_delta(delta)
            if delta.finish_reason is not None:
                sequence.on_ended()


class GrammarCompiler:
    """Compiles grammars in a thread. Loads the tokenizer on first use; without one, rejects requests with a grammar."""

    def __init__(self, load: Callable[[], Grammars] | None = None) -> None:
        self._load = load
        self._grammars: Grammars | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    async def compile(self, grammar: Grammar | None, with_twins: bool) -> Constraint | None:
        """Return the constraint of a grammar; None for None. `with_twins`: its tokens are drafted.

        Raises InvalidRequest if it does not compile, Incompatible if it was made for another tokenizer.
        """
        if grammar is None:
            return None
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._open, grammar, with_twins)

    def close(self) -> None:
        """Cancel compilations that have not started."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _open(self, grammar: Grammar, with_twins: bool) -> Constraint:
        if self._load is None:
            raise Incompatible("this worker has no tokenizer; set WEFT_MODEL to the model's directory")
        if self._grammars is None:
            self._grammars = self._load()
        if self._grammars.tokenizer_hash != grammar.tokenizer_hash:
            raise Incompatible("the grammar was made for another tokenizer.json than this worker's")
        return self._grammars.compile(grammar.text, with_twins)


class StatsRecorder:
    """Cache hits and KV transfers of a worker, for Prometheus and for its reports. Belongs to the event loop."""

    def __init__(self) -> None:
        self._looked_up = 0
        self._found: Counter[Tier] = Counter()
        self._seconds: dict[Tier, float] = dict.fromkeys(Tier, 0.0)
        self._transfers: dict[str, TransferStats] = {}

    def declare_failures(self, reasons: Iterable[str]) -> None:
        """Create the series of these failure reasons, so that their first event is visible."""
        metrics.init_series(metrics.TRANSFER_FAILURES, reasons)

    def on_lookup(self, num_tokens: int, found: Mapping[Tier, int]) -> None:
        """Count a prompt's tokens, and those found in each tier."""
        self._looked_up += num_tokens
        metrics.PREFIX_QUERIES.inc(num_tokens)
        for tier, count in found.items():
            self._found[tier] += count
            metrics.PREFIX_HITS.labels(tier).inc(count)

    def on_fetched(self, seconds: Mapping[Tier, float]) -> None:
        """Count seconds of fetching by tier."""
        for tier, took in seconds.items():
            self._seconds[tier] += took

    def on_transfer(self, lender_id: str, size_bytes: int) -> None:
        """Count a prompt with blocks from this prefill worker."""
        old = self._of(lender_id)
        self._put(TransferStats(lender_id, old.num_prompts + 1, old.size_bytes + size_bytes, old.num_failed))

    def on_transfer_failed(self, lender_id: str, reason: str) -> None:
        """Count a discarded transfer from this prefill worker."""
        metrics.TRANSFER_FAILURES.labels(reason).inc()
        old = self._of(lender_id)
        self._put(TransferStats(lender_id, old.num_prompts, old.size_bytes, old.num_failed + 1))

    def read(self) -> WorkerStats:
        found, seconds = self._found, self._seconds
        prefix = PrefixCacheStats(
            self._looked_up,
            found[Tier.POOL],
            found[Tier.DRAM],
            found[Tier.NVME],
            seconds[Tier.DRAM],
            seconds[Tier.NVME],
        )
        return WorkerStats(prefix, tuple(self._transfers.values()))

    def _of(self, lender_id: str) -> TransferStats:
        return self._transfers.pop(lender_id, None) or TransferStats(lender_id)

    def _put(self, stats: TransferStats) -> None:
        """Store the counters; the least recently used worker is dropped first."""
        self._transfers[stats.prefill_worker_id] = stats
        if len(self._transfers) > MAX_PREFILL_WORKERS:
            del self._transfers[next(iter(self._transfers))]
