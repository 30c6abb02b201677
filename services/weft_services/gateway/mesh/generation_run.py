"""One client request on the mesh: places its sequences, migrates them when workers fail, and merges their updates.

A migration sends the generated tokens along as part of the prompt. Noise is keyed on (seed, position, token), so the
text continues exactly as it would have. Only this module retries, because only it knows what the client has received.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from weft import metrics
from weft.errors import (
    DeadlineExceeded,
    EngineFailed,
    NoWorker,
    Overloaded,
    PeerLost,
    QueueFull,
    SamplingChanged,
    WeftError,
)
from weft.fleet_types import Priority, RouteQuery
from weft.request import (
    NO_DRAFTS,
    DraftCounts,
    PromptUsage,
    RequestKey,
    RequestStage,
    WorkerAddress,
    new_id,
)
from weft.rpc.client import as_weft_error
from weft.stall_clock import StallAwareClock
from weft_services.gateway.mesh.choice_text import ChoiceText, ChoiceUpdate
from weft_services.gateway.mesh.decode_connection import (
    DELTAS_PER_SEQUENCE,
    MAX_DELTAS,
    DecodeConnection,
    DecodeConnectionPool,
    SequenceUpdate,
    StartCommand,
    StartMessage,
    UpdateQueue,
    to_start_message,
)
from weft_services.gateway.mesh.fleet import HandOff
from weft_services.gateway.mesh.prepare import PreparedRequest
from weft_services.gateway.mesh.routing_hints import RoutingHints
from weft_services.gateway.mesh.scheduler_client import (
    Forecast,
    PlacementReservation,
    RejectionCache,
    SchedulerClient,
    SequencePlacement,
    SettlementQueue,
    StreamLost,
)
from weft_services.gateway.text.codec import Codec

logger = logging.getLogger(__name__)


# Consecutive migrations without a new token, by cause. A request that crashes its workers must not take down the fleet.
MAX_EMPTY_ATTEMPTS = {PeerLost: 2, Overloaded: 2, EngineFailed: 1}
MAX_MIGRATIONS = 32
# A boot that failed a sequence is not asked for it again for this long; a new boot of the worker is.
SUSPECT_SECONDS = 3.0
# The scheduler accepts at most this many excluded boots.
MAX_EXCLUDED = 64
# The scheduler rejects more; this covers a million tokens in blocks of 16.
MAX_BLOCK_KEYS = 65_536
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.05, 0.5
_CAUSES: dict[type[WeftError], str] = {PeerLost: "lost", Overloaded: "full", EngineFailed: "failed"}
metrics.init_series(metrics.SEQUENCE_MIGRATIONS, _CAUSES.values())


@dataclass(frozen=True, slots=True)
class MeshContext:
    """What all sequences need: clients of other services, the task group of migrations, and shared state.

    `migration_seconds` bounds the wait for a worker. `was_served_recently` returns true for a model that had its
    workers within that time and may get them back soon.
    """

    scheduler: SchedulerClient
    connections: DecodeConnectionPool
    settlements: SettlementQueue
    tasks: asyncio.TaskGroup
    migration_seconds: float
    on_hand_off: Callable[[HandOff], None] = lambda hand_off: None
    rejections: RejectionCache = field(default_factory=RejectionCache)
    was_served_recently: Callable[[str], bool] = lambda model: False
    clock: StallAwareClock = field(default_factory=StallAwareClock)


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What the sequences of one request share. `deadline` is in event-loop time."""

    prepared: PreparedRequest
    hints: RoutingHints
    deadline: float
    updates: UpdateQueue

    def remaining_seconds(self) -> float:
        """Return the time left. Raises DeadlineExceeded if there is none."""
        remaining = self.deadline - asyncio.get_running_loop().time()
        if remaining <= 0:
            raise DeadlineExceeded("the request took too long")
        return remaining


class SequenceRunner:
    """A sequence and its attempts. The key's generation counts placements; updates of older ones are ignored.

    `usage` comes from the first attempt that produced a token, and is what the client's prompt cost. `forecast` comes
    from the first placement. When no attempt is left, `failure` is set and the request's task woken.
    """

    def __init__(self, mesh: MeshContext, shared: RequestContext, request_id: str, sequence: ChoiceText) -> None:
        self.choice = sequence
        self.key = RequestKey(request_id)
        self.usage: PromptUsage | None = None
        self.forecast: Forecast | None = None
        self.failure: WeftError | None = None
        self.num_attempts = 0
        self._mesh = mesh
        self._shared = shared
        spec = shared.prepared.sequences[sequence.index]
        self._prompt = shared.prepared.prompts[spec.prompt]
        self._sampling = spec.sampling
        self._num_prompt_logprobs = spec.num_prompt_logprobs
        self._suspects: dict[str, float] = {}  # boot id -> end of the exclusion
        self._num_resumed = 0
        self._sampling_version: int | None = None  # of the worker that began the answer
        self._num_empty_attempts = 0
        self._decode: WorkerAddress | None = None
        self._reservation: PlacementReservation | None = None
        self._connection: DecodeConnection | None = None
        self._start_message: StartMessage | None = None
        self._migration: asyncio.Task[None] | None = None

    @property
    def is_done(self) -> bool:
        """True once the choice has finished normally."""
        return self.choice.finish_reason is not None

    @property
    def decode_id(self) -> str:
        """The decode worker of the latest attempt; empty before the first."""
        return self._decode.worker_id if self._decode is not None else ""

    def on_tokens(self, usage: PromptUsage | None) -> None:
        """Record that tokens arrived; `usage` comes with the first tokens of an attempt."""
        if usage is not None and usage.prefill_worker_id != self.decode_id:
            hand_off = HandOff(
                usage.prefill_worker_id, self.decode_id, usage.transferred_bytes, usage.exposed_transfer_ms
            )
            self._mesh.on_hand_off(hand_off)
        self.usage = self.usage or usage
        if self._reservation is not None:
            self._reservation.first_token(usage.failed_worker_id if usage else "")

    def migrate(self, error: WeftError, worker_id: str) -> None:
        """Start the next attempt in the background after a failure. Raises `error` if no attempt is left."""
        logger.warning("attempt failed attempt=%s worker=%s error=%s", self.key, worker_id or "unknown", error)
        assert self._decode is not None
        if isinstance(error, PeerLost) and self._mesh.clock.stalled_recently:
            # This process was stalled: connections that broke then say nothing about the worker or the request.
            self._reset_attempt(RequestStage.FAILED)
        else:
            self._suspect(self._decode)
            self._reset_attempt(RequestStage.FAILED, _at_fault(error, worker_id))
            self._num_empty_attempts = (
                0 if len(self.choice.token_ids) > self._num_resumed else self._num_empty_attempts + 1
            )
        has_tried = (
            self._num_empty_attempts > MAX_EMPTY_ATTEMPTS.get(type(error), -1) or self.num_attempts > MAX_MIGRATIONS
        )
        if has_tried or self._mesh.connections.is_closed:
            raise error
        metrics.SEQUENCE_MIGRATIONS.labels(_CAUSES[type(error)]).inc()
        self._migration = self._mesh.tasks.create_task(self._run_migration(error), name=f"migrate {self.key}")

    def end(self, stage: RequestStage, failed_worker_id: str = "", cancel: bool = True) -> None:
        """Release the connection and the reservation of the current attempt. Idempotent."""
        if self._connection is not None:
            if cancel:
                self._connection.cancel(self.key)
            else:
                self._connection.forget(self.key)
            self._connection = None
        if self._reservation is not None:
            num_tokens = len(self.choice.token_ids) - self._num_resumed if stage is RequestStage.FINISHED else None
            self._reservation.close(stage, failed_worker_id, num_tokens)
            self._reservation = None

    def cancel(self) -> None:
        """Stop the sequence, including a migration in progress."""
        if self._migration is not None:
            self._migration.cancel()
        self.end(RequestStage.CANCELLED)

    async def _run_migration(self, failed: WeftError) -> None:
        try:
            await self.place(failed)
        except WeftError as error:
            self.failure = error
        except Exception:
            logger.exception("migration failed unexpectedly")
            self.failure = EngineFailed("internal error")
        if self.failure is not None:
            self._shared.updates.wake()

    async def place(self, failed: WeftError | None = None) -> None:
        """Place and start an attempt, retrying until it runs.

        `failed` is the error of the previous attempt. A lost worker may return, so this waits up to
        `migration_seconds`. Then it raises `failed`, or the last refusal if nothing had started or the workers that
        are left sample other tokens.
        """
        clock, pause = self._mesh.clock, FIRST_PAUSE_SECONDS
        give_up_at = clock() + self._mesh.migration_seconds
        while True:
            try:
                placement = await self._route()
            except (PeerLost, Overloaded) as refusal:
                if not self._may_wait(refusal, failed) or clock() > give_up_at:
                    if failed is None or isinstance(refusal, SamplingChanged):
                        raise
                    raise failed from refusal
                if pause == FIRST_PAUSE_SECONDS:
                    logger.warning("waiting for a worker sequence=%s reason=%s", self.key, refusal)
                if self._reservation is not None or failed is not None:
                    self._reset_attempt(RequestStage.CANCELLED)
                await asyncio.sleep(min(pause * random.uniform(0.5, 1.0), self._shared.remaining_seconds()))
                pause = min(2 * pause, MAX_PAUSE_SECONDS)
                continue
            try:
                await self._start(placement)
            except (PeerLost, Overloaded) as error:
                logger.warning("attempt cannot start sequence=%s error=%s", self.key, error)
                failed = failed or error
                self._suspect(placement.decode)
                self._reset_attempt(RequestStage.FAILED, error.worker_id if isinstance(error, PeerLost) else "")
                # Another unreachable worker may follow for ever; and a closing gateway can reach none.
                if self._mesh.connections.is_closed or clock() > give_up_at:
                    raise failed from None
            else:
                return

    @property
    def _num_scored(self) -> int | None:
        """Logprobs to request for the prompt; None once they have arrived with the first token."""
        return None if self.choice.token_ids else self._num_prompt_logprobs

    def _may_wait(self, refusal: WeftError, failed: WeftError | None) -> bool:
        """True if waiting can help: not while closing, and not before the first start if the worker is merely full.

        A full worker is the client's choice to wait for. Waiting does not help either if the worker left long ago,
        never joined, or was withdrawn by an operator.
        """
        if self._mesh.connections.is_closed:
            return False
        if failed is None:
            generation = self._shared.prepared.generation
            is_away = isinstance(refusal, NoWorker | StreamLost) and not generation.reject_if_busy
            return is_away and self._mesh.was_served_recently(generation.model)
        return bool(self.choice.token_ids) or not isinstance(failed, Overloaded)

    async def _route(self) -> SequencePlacement:
        """Reserve a placement, excluding boots that have just failed this sequence."""
        now = asyncio.get_running_loop().time()
        num_generated, hints = len(self.choice.token_ids), self._shared.hints
        query = RouteQuery(
            key=self.key,
            model=self._shared.prepared.generation.model,
            prompt_tokens=len(self._prompt.token_ids) + num_generated,
            max_tokens=self._sampling.max_tokens - num_generated,
            session=hints.session,
            block_keys=self._prompt.block_keys[:MAX_BLOCK_KEYS],
            excluded_boot_ids=frozenset(
                [boot for boot, until in self._suspects.items() if now < until][-MAX_EXCLUDED:]
            ),
            tenant=hints.tenant,
            priority=Priority.from_engine(hints.priority),
            # A sequence that already has tokens waits rather than fails.
            reject_if_busy=self._shared.prepared.generation.reject_if_busy and self.num_attempts == 0,
            resumed_tokens=num_generated,
            computes_prompt=self._num_scored is not None,
            sampling_version=self._sampling_version if num_generated and self._sampling.temperature > 0 else None,
        )
        self._mesh.rejections.check(query)
        # Created before the call: if the call breaks, the scheduler still gets a settlement.
        self._reservation = PlacementReservation(self.key, self._mesh.settlements)
        try:
            placement = await self._mesh.scheduler.route(query, self._shared.remaining_seconds(), self._compose)
        except (Overloaded, NoWorker) as error:
            self._reservation = None  # A rejected request reserves nothing, so no settlement is due.
            if isinstance(error, QueueFull):
                self._mesh.rejections.add(query, error)
            raise
        self.forecast = self.forecast or placement.forecast
        return placement

    def _compose(self) -> None:
        generated = self.choice.token_ids
        command = StartCommand(
            key=self.key,
            token_ids=(*self._prompt.token_ids, *generated),
            sampling=self._sampling,
            cache_salt=self._shared.prepared.cache_salt,
            resumed_tokens=len(generated),
            priority=self._shared.hints.priority,
            retention=self._shared.prepared.generation.retention,
            num_prompt_logprobs=self._num_scored,
            speculation=self._shared.prepared.speculation,
        )
        self._start_message = to_start_message(command)

    async def _start(self, placement: SequencePlacement) -> None:
        connection = await self._mesh.connections.get(placement.decode)
        assert self._start_message is not None, "composed while the scheduler was asked"
        connection.start(
            self.key, self._start_message, placement, self._shared.remaining_seconds(), self._shared.updates
        )
        self._connection, self._decode = connection, placement.decode
        self._num_resumed = num_generated = len(self.choice.token_ids)
        if not num_generated:
            self._sampling_version = placement.sampling_version
        self.num_attempts += 1
        if self.num_attempts > 1:
            worker_id = connection.worker.worker_id
            logger.info("sequence migrated worker=%s sequence=%s tokens=%d", worker_id, self.key, num_generated)

    def _reset_attempt(self, stage: RequestStage, failed_worker_id: str = "") -> None:
        """Give up the current placement; its remaining updates count as late."""
        self.end(stage, failed_worker_id, cancel=False)
        self.key = RequestKey(self.key.request_id, self.key.generation + 1)

    def _suspect(self, worker: WorkerAddress) -> None:
        self._suspects.pop(worker.boot_id, None)  # keeps the dict ordered by age
        self._suspects[worker.boot_id] = asyncio.get_running_loop().time() + SUSPECT_SECONDS


def _at_fault(error: WeftError, worker_id: str) -> str:
    """Id of the worker to exclude, or empty. Full or restarted workers and bad or late requests put no blame."""
    if isinstance(error, PeerLost):
        return error.worker_id
    return worker_id if isinstance(error, EngineFailed) else ""


class GenerationRun:
    """Use as `async with GenerationRun(...) as run:`, then await `run.next()` until None. Leaving early cancels."""

    def __init__(
        self, mesh: MeshContext, prepared: PreparedRequest, codec: Codec, hints: RoutingHints, deadline: float
    ) -> None:
        """`deadline` is in event-loop time."""
        self.prepared = prepared
        max_deltas = max(MAX_DELTAS, DELTAS_PER_SEQUENCE * len(prepared.sequences))
        self._shared = RequestContext(prepared, hints, deadline, UpdateQueue(self._cancel, max_deltas))
        self._failure: WeftError | None = None  # raised after the updates before it are delivered
        self._runners = [
            SequenceRunner(
                mesh,
                self._shared,
                new_id(),
                ChoiceText(index, codec, prepared.stops(index), spec.max_tokens, prepared.prompts[spec.prompt].context),
            )
            for index, spec in enumerate(prepared.sequences)
        ]
        self._num_open = len(self._runners)
        self._separates_drafts = prepared.generation.include_draft_tokens
        self._by_id = {runner.key.request_id: runner for runner in self._runners}

    async def __aenter__(self) -> Self:
        try:
            await self._place()
        except BaseException as error:
            self._cancel()
            if isinstance(error, BaseExceptionGroup):
                raise as_weft_error(error) from error
            raise
        return self

    async def _place(self) -> None:
        if len(self._runners) == 1:
            await self._runners[0].place()
            return
        async with asyncio.TaskGroup() as group:
            for runner in self._runners:
                group.create_task(runner.place())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cancel()

    @property
    def request_id(self) -> str:
        """The first sequence's id in the mesh, as it appears in the workers' logs."""
        return self._runners[0].key.request_id

    @property
    def num_attempts(self) -> int:
        """Starts on workers over all sequences; more than the number of sequences means migrations."""
        return sum(runner.num_attempts for runner in self._runners)

    @property
    def num_completion_tokens(self) -> int:
        """Tokens generated so far, end tokens included."""
        return sum(len(runner.choice.token_ids) for runner in self._runners)

    @property
    def drafts(self) -> DraftCounts:
        """Draft tokens of all sequences and their attempts so far."""
        return sum((runner.choice.drafts for runner in self._runners), NO_DRAFTS)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that prefill took from the cache.

        Each prompt counts once. Of several choices that continue one prompt, the one with the fewest cached tokens
        counts.
        """
        cached = [len(prompt.token_ids) for prompt in self.prepared.prompts]
        for runner, spec in zip(self._runners, self.prepared.sequences, strict=True):
            count = runner.usage.cached_tokens if runner.usage else 0
            cached[spec.prompt] = min(cached[spec.prompt], count)
        return sum(cached)

    @property
    def finish_reasons(self) -> list[str]:
        """Finish reasons of the choices that have ended."""
        return [str(runner.choice.finish_reason) for runner in self._runners if runner.is_done]

    @property
    def decode_id(self) -> str:
        """The decode worker of the first sequence; empty before its first start."""
        return self._runners[0].decode_id

    @property
    def worst_prompt(self) -> PromptUsage:
        """Usage of the prompt that took longest, for the access log."""
        usages = [runner.usage for runner in self._runners if runner.usage is not None]
        return max(usages, key=lambda usage: usage.queue_ms + usage.compute_ms, default=PromptUsage())

    @property
    def forecast(self) -> Forecast | None:
        """The scheduler's forecast for the sequence with the longest expected TTFT, at its first placement."""
        forecasts = [runner.forecast for runner in self._runners if runner.forecast is not None]
        return max(forecasts, key=lambda forecast: forecast.ttft_ms, default=None)

    async def next(self, idle_seconds: float) -> list[ChoiceUpdate] | None:
        """Return what has arrived: one update per choice, or several in order if the request separates drafts.

        The list is empty after `idle_seconds` without updates; None means the end. Raises WeftError when a sequence has
        failed for good, DeadlineExceeded when the deadline has passed.
        """
        loop, updates = asyncio.get_running_loop(), self._shared.updates
        until = min(loop.time() + idle_seconds, self._shared.deadline)
        while self._failure is None and self._num_open:
            if pieces := self._accept(await updates.wait(until)):
                return pieces
            now = loop.time()
            if now >= self._shared.deadline:
                raise DeadlineExceeded("the request took too long")
            if now >= until:
                return []
        if self._failure is not None:
            raise self._failure
        return None

    def _accept(self, deltas: list[SequenceUpdate]) -> list[ChoiceUpdate]:
        grouped: dict[str, list[SequenceUpdate]] = {}
        broken: dict[str, SequenceUpdate] = {}
        for delta in deltas:
            request_id = delta.key.request_id
            runner = self._by_id.get(request_id)
            is_late = runner is None or runner.is_done or (delta.key is not runner.key and delta.key != runner.key)
            if is_late or request_id in broken:
                continue  # from an earlier attempt
            if delta.error is not None:
                broken[request_id] = delta
            else:
                grouped.setdefault(request_id, []).append(delta)
        pieces: list[ChoiceUpdate] = []
        for request_id, batch in grouped.items():
            pieces += self._advance(self._by_id[request_id], batch)
        for runner in self._runners:
            self._failure = self._failure or runner.failure
        for request_id, delta in broken.items():
            runner = self._by_id[request_id]
            if delta.error is None or runner.is_done:
                continue
            try:
                runner.migrate(delta.error, delta.worker_id)
            except WeftError as error:
                self._failure = error
        return pieces

    def _advance(self, runner: SequenceRunner, deltas: list[SequenceUpdate]) -> list[ChoiceUpdate]:
        choice = runner.choice
        updates = choice.accept_apart(deltas) if self._separates_drafts else [choice.accept(deltas)]
        # Updates with prompt logprobs only are held back until the first token.
        pieces = [piece for piece in updates if piece.token_ids or piece.finish_reason is not None]
        if pieces:
            usage = None
            for delta in deltas:
                usage = usage or delta.prompt
            runner.on_tokens(usage)
        if runner.is_done:
            self._num_open -= 1
            engine_has_ended = deltas[-1].finish_reason is not None
            runner.end(RequestStage.FINISHED, cancel=not engine_has_ended)
        return pieces

    def _cancel(self) -> None:
        self._shared.updates.close()
        for runner in self._runners:
            runner.cancel()
