"""One choice of an answer as it grows: token deltas in, pieces of text out. No network, no clock.

One sequence's way over the mesh: placed, moved to another worker when its own is lost, given back at the end.

What has been generated moves along as part of the prompt; sampling is keyed on (seed, position), so the text goes on as
it would have. Knows workers and attempts, neither text nor clients.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from weft import metrics
from weft.errors import DeadlineExceeded, EngineFailed, NoWorker, Overloaded, PeerLost, QueueFull, WeftError
from weft.fleet_types import Priority, RouteQuery
from weft.request import FinishReason, PositionLogprobs, PromptLogprobs, PromptUsage, RequestKey, WorkerAddress
from weft.request_stage import RequestStage
from weft.stall_clock import StallAwareClock
from weft_services.gateway.mesh.decode_connection import (
    DecodeConnection,
    DecodeConnectionPool,
    DeltaQueue,
    SequenceUpdate,
    StartMessage,
    to_start_message,
)
from weft_services.gateway.mesh.prepare import PreparedRequest
from weft_services.gateway.mesh.routing_hints import RoutingHints
from weft_services.gateway.mesh.scheduler_client import RejectionCache, SchedulerClient, StreamLost
from weft_services.gateway.mesh.scheduler_types import (
    Forecast,
    HandOff,
    SequencePlacement,
    StartCommand,
)
from weft_services.gateway.mesh.settlement_queue import PlacementReservation, SettlementQueue
from weft_services.gateway.text.codec import Codec
from weft_services.gateway.text.stop_strings import StopMatcher


@dataclass(slots=True)  # not frozen: there is one a token
class ChoiceUpdate:
    """What a batch of deltas added to choice `index`. The last piece has a finish reason, and the stop string if that
    was it; the first one what was asked of the prompt's logprobs."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...]
    finish_reason: FinishReason | None
    stop: str | None = None
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()


class ChoiceText:
    """Text state of one choice. `token_ids` is everything generated so far: what moving it elsewhere would need.

    It ends with `max_tokens`, whether the worker that generates says so or not.
    """

    def __init__(
        self, index: int, codec: Codec, stops: StopMatcher | None, max_tokens: int, context: Items[int] = ()
    ) -> None:
        """`context`: the last tokens of a text that is gone on with."""
        self.index = index
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._stop: str | None = None
        self._prompt_logprobs: list[PromptLogprobs] = []  # that nobody has been told yet
        self._max_tokens = max_tokens
        self._detokenizer = codec.detokenizer(context)
        self._stops = stops

    def accept(self, deltas: Items[SequenceUpdate]) -> ChoiceUpdate:
        """Take the deltas in, in order; those after the end are dropped."""
        texts: list[str] = []
        start = len(self.token_ids)
        logprobs: list[PositionLogprobs] = []
        for delta in deltas:
            if self.finish_reason is not None:
                break
            if delta.prompt_logprobs is not None:
                self._note(delta.prompt_logprobs)
                continue
            num_before = len(self.token_ids)
            texts.append(self._accept_one(delta))
            if delta.logprobs:
                logprobs.extend(delta.logprobs[: len(self.token_ids) - num_before])
        tokens = tuple(self.token_ids[start:])
        piece = ChoiceUpdate(self.index, "".join(texts), tokens, tuple(logprobs), self.finish_reason, self._stop)
        if self._prompt_logprobs and (tokens or self.finish_reason is not None):
            piece.prompt_logprobs = tuple(self._prompt_logprobs)
            self._prompt_logprobs.clear()
        return piece

    def _note(self, piece: PromptLogprobs) -> None:
        """Of an attempt that has not spoken yet; where that is lost, the next one begins again."""
        if piece.start == 1:
            self._prompt_logprobs.clear()
        self._prompt_logprobs.append(piece)

    def _accept_one(self, delta: SequenceUpdate) -> str:
        room = self._max_tokens - len(self.token_ids)
        ids, reason = delta.token_ids, delta.finish_reason
        if len(ids) > room or (len(ids) == room and reason is None):
            ids, reason = ids[:room], FinishReason.LENGTH
        # the token that ends a sequence is counted and reported, its text is not part of the answer
        spoken = ids[:-1] if reason is FinishReason.STOP else ids
        text = self._speak(spoken) if self._stops is None else self._scan(spoken, self._stops)
        if self.finish_reason is None:
            self.token_ids.extend(ids[len(spoken) :])
            if reason is not None:
                text += self._end(reason)
        return text

    def _speak(self, ids: tuple[int, ...]) -> str:
        self.token_ids.extend(ids)
        return self._detokenizer.push(ids)

    def _scan(self, ids: tuple[int, ...], stops: StopMatcher) -> str:
        """Token by token: the one that completes a stop string must be told from those after it."""
        texts: list[str] = []
        for token_id in ids:
            text, self._stop = stops.push(self._speak((token_id,)))
            texts.append(text)
            if self._stop is not None:
                self.finish_reason = FinishReason.STOP
                break
        return "".join(texts)

    def _end(self, reason: FinishReason) -> str:
        rest = self._detokenizer.flush()
        self.finish_reason = reason
        if self._stops is None:
            return rest
        text, self._stop = self._stops.push(rest)
        if self._stop is None:
            rest, self._stop = self._stops.finish(is_cut=reason is FinishReason.LENGTH)
            text += rest
        if self._stop is not None:
            self.finish_reason = FinishReason.STOP
        return text


logger = logging.getLogger(__name__)

# moves in a row without a token in between: a request that kills its workers must not kill the fleet
MAX_EMPTY_ATTEMPTS = {PeerLost: 2, Overloaded: 2, EngineFailed: 1}
MAX_MIGRATIONS = 32
# for so long a process that failed a sequence is not asked for it again; another boot of the worker is
SUSPECT_SECONDS = 3.0
# processes that the scheduler is asked to pass over; it takes no longer list
MAX_EXCLUDED = 64
# the scheduler looks no further, and refuses more: a million tokens of 16 to a block
MAX_BLOCK_KEYS = 65_536
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.05, 0.5
_CAUSES: dict[type[WeftError], str] = {PeerLost: "lost", Overloaded: "full", EngineFailed: "failed"}
metrics.init_series(metrics.SEQUENCE_MIGRATIONS, _CAUSES.values())


@dataclass(frozen=True, slots=True)
class MeshContext:
    """The peers a sequence needs, the group that owns its moves, how long one may wait for a worker, who is told of
    hand-offs, and what has just been refused. `misses`: a model's worker was there within that time, and may be back
    soon."""

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
    """What all sequences of a request have in common; `deadline` in the loop's time."""

    prepared: PreparedRequest
    hints: RoutingHints
    deadline: float
    updates: DeltaQueue

    def remaining_seconds(self) -> float:
        """Raises DeadlineExceeded when nothing is left."""
        remaining = self.deadline - asyncio.get_running_loop().time()
        if remaining <= 0:
            raise DeadlineExceeded("the request took too long")
        return remaining


class SequenceRunner:
    """A sequence under way. The key's generation counts placements; messages of older ones are late.

    `usage` is that of the first attempt that spoke: what the client's prompt cost; `forecast` that of the first
    placement. `failure` is set when no attempt is left, and the inbox woken.
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
        self._suspects: dict[str, float] = {}  # boot id -> until when
        self._num_resumed = 0
        self._num_empty_attempts = 0
        self._decode: WorkerAddress | None = None
        self._reservation: PlacementReservation | None = None
        self._connection: DecodeConnection | None = None
        self._start_message: StartMessage | None = None
        self._migration: asyncio.Task[None] | None = None

    @property
    def is_done(self) -> bool:
        """The sequence has come to its own end."""
        return self.choice.finish_reason is not None

    @property
    def decode_id(self) -> str:
        """The decode worker of the latest attempt; empty before the first."""
        return self._decode.worker_id if self._decode is not None else ""

    async def place(self) -> None:
        """The first placement. Waits for a worker up to `move_seconds`, where one was there a moment ago."""
        await self._place(None)

    def on_tokens(self, usage: PromptUsage | None) -> None:
        """Tokens have come; `usage` with the first of an attempt."""
        if usage is not None and usage.prefill_worker_id != self.decode_id:
            hand_off = HandOff(
                usage.prefill_worker_id, self.decode_id, usage.transferred_bytes, usage.exposed_transfer_ms
            )
            self._mesh.on_hand_off(hand_off)
        self.usage = self.usage or usage
        if self._reservation is not None:
            self._reservation.first_token(usage.failed_worker_id if usage else "")

    def migrate(self, error: WeftError, worker_id: str) -> None:
        """The attempt has failed: begin the next in the background. Raises the error when it must be the last."""
        logger.warning("attempt=%s failed worker=%s error=%s", self.key, worker_id or "unknown", error)
        assert self._decode is not None
        if isinstance(error, PeerLost) and self._mesh.clock.stalled_recently:
            # this process stood still: connections that broke over it say nothing of workers, nor of the request
            self._try_again(RequestStage.FAILED)
        else:
            self._suspect(self._decode)
            self._try_again(RequestStage.FAILED, _at_fault(error, worker_id))
            self._num_empty_attempts = (
                0 if len(self.choice.token_ids) > self._num_resumed else self._num_empty_attempts + 1
            )
        has_tried = (
            self._num_empty_attempts > MAX_EMPTY_ATTEMPTS.get(type(error), -1) or self.num_attempts > MAX_MIGRATIONS
        )
        if has_tried or self._mesh.connections.is_closed:
            raise error
        metrics.SEQUENCE_MIGRATIONS.labels(_CAUSES[type(error)]).inc()
        self._migration = self._mesh.tasks.create_task(self._move_on(error), name=f"move {self.key}")

    def end(self, stage: RequestStage, failed_worker_id: str = "", cancel: bool = True) -> None:
        """Give back what the attempt holds. Idempotent."""
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
        """Nobody waits for it any more."""
        if self._migration is not None:
            self._migration.cancel()
        self.end(RequestStage.CANCELLED)

    async def _move_on(self, failed: WeftError) -> None:
        try:
            await self._place(failed)
        except WeftError as error:
            self.failure = error
        except Exception:
            logger.exception("a move failed by a bug")
            self.failure = EngineFailed("internal error")
        if self.failure is not None:
            self._shared.updates.wake()

    async def _place(self, failed: WeftError | None) -> None:
        """Until it has been started somewhere. `failed` is what the attempt before died of.

        In place of a lost worker another is waited for, up to `move_seconds`; then `failed` is raised, or the last
        refusal where nothing was begun.
        """
        clock, pause = self._mesh.clock, FIRST_PAUSE_SECONDS
        give_up_at = clock() + self._mesh.migration_seconds
        while True:
            try:
                placement = await self._route()
            except (PeerLost, Overloaded) as refusal:
                if not self._may_wait(refusal, failed) or clock() > give_up_at:
                    if failed is None:
                        raise
                    raise failed from refusal
                if pause == FIRST_PAUSE_SECONDS:
                    logger.warning("sequence=%s waits for a worker: %s", self.key, refusal)
                if self._reservation is not None or failed is not None:
                    self._try_again(RequestStage.CANCELLED)
                await asyncio.sleep(min(pause * random.uniform(0.5, 1.0), self._shared.remaining_seconds()))
                pause = min(2 * pause, MAX_PAUSE_SECONDS)
                continue
            try:
                await self._start(placement)
            except (PeerLost, Overloaded) as error:
                logger.warning("sequence=%s cannot start: %s", self.key, error)
                failed = failed or error
                self._suspect(placement.decode)
                self._try_again(RequestStage.FAILED, error.worker_id if isinstance(error, PeerLost) else "")
                # there may always be another that cannot be reached; once this gateway is leaving nobody can
                if self._mesh.connections.is_closed or clock() > give_up_at:
                    raise failed from None
            else:
                return

    @property
    def _num_scored(self) -> int | None:
        """Once an attempt has spoken, all that was asked of the prompt is there."""
        return None if self.choice.token_ids else self._num_prompt_logprobs

    def _may_wait(self, refusal: WeftError, failed: WeftError | None) -> bool:
        """Not once this gateway is leaving, and not for a full worker before anything was begun: that is the client's
        choice. Nor then for a worker that has long been away, never was there, or that an operator withdrew."""
        if self._mesh.connections.is_closed:
            return False
        if failed is None:
            generation = self._shared.prepared.generation
            is_away = isinstance(refusal, NoWorker | StreamLost) and not generation.reject_if_busy
            return is_away and self._mesh.was_served_recently(generation.model)
        return bool(self.choice.token_ids) or not isinstance(failed, Overloaded)

    async def _route(self) -> SequencePlacement:
        """Book and choose, passing over processes that have just failed this sequence."""
        now = asyncio.get_running_loop().time()
        num_generated, standing = len(self.choice.token_ids), self._shared.hints
        query = RouteQuery(
            key=self.key,
            model=self._shared.prepared.generation.model,
            prompt_tokens=len(self._prompt.token_ids) + num_generated,
            max_tokens=self._sampling.max_tokens - num_generated,
            session=standing.session,
            block_keys=self._prompt.block_keys[:MAX_BLOCK_KEYS],
            excluded_boot_ids=frozenset(
                [boot for boot, until in self._suspects.items() if now < until][-MAX_EXCLUDED:]
            ),
            tenant=standing.tenant,
            priority=Priority.from_engine(standing.priority),
            # whose answer has begun would rather wait than lose it
            reject_if_busy=self._shared.prepared.generation.reject_if_busy and self.num_attempts == 0,
            resumed_tokens=num_generated,
            computes_prompt=self._num_scored is not None,
        )
        self._mesh.rejections.check(query)
        # booked before the call: if it breaks half-way, the scheduler is told in any case
        self._reservation = PlacementReservation(self.key, self._mesh.settlements)
        try:
            placement = await self._mesh.scheduler.route(query, self._shared.remaining_seconds(), self._compose)
        except (Overloaded, NoWorker) as error:
            self._reservation = None  # a refused request holds nothing: a fleet that is full need not be told
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
        )
        self._start_message = to_start_message(command)

    async def _start(self, placement: SequencePlacement) -> None:
        link = await self._mesh.connections.get(placement.decode)
        assert self._start_message is not None, "composed while the scheduler was asked"
        link.start(self.key, self._start_message, placement, self._shared.remaining_seconds(), self._shared.updates)
        self._connection, self._decode = link, placement.decode
        self._num_resumed = num_generated = len(self.choice.token_ids)
        self.num_attempts += 1
        if self.num_attempts > 1:
            logger.info("sequence=%s goes on at worker=%s tokens=%d", self.key, link.worker.worker_id, num_generated)

    def _try_again(self, stage: RequestStage, failed_worker_id: str = "") -> None:
        """The placement has come to nothing; what is still said of it is late from here on."""
        self.end(stage, failed_worker_id, cancel=False)
        self.key = RequestKey(self.key.request_id, self.key.generation + 1)

    def _suspect(self, worker: WorkerAddress) -> None:
        self._suspects.pop(worker.boot_id, None)  # the newest are last
        self._suspects[worker.boot_id] = asyncio.get_running_loop().time() + SUSPECT_SECONDS


def _at_fault(error: WeftError, worker_id: str) -> str:
    """Whom to pass over for a while. A worker that is full or restarted, or a request that is bad or late, blames
    nobody."""
    if isinstance(error, PeerLost):
        return error.worker_id
    return worker_id if isinstance(error, EngineFailed) else ""
