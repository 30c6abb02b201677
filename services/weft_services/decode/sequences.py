"""Sequences on the decode worker: submitted, filled by prefill or computed here, generating, ended.

Every sequence has one task and one exit, where the engine releases it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from weft import log, metrics, trace
from weft.engine.messages import PromptCounts, Reserved, SequenceMode, SequenceSpec, TokenDelta
from weft.errors import (
    DeadlineExceeded,
    EngineFailed,
    Incompatible,
    InvalidRequest,
    Overloaded,
    PeerLost,
    WeftError,
)
from weft.kv.block_pool import Tier
from weft.kv.transfer import PrefillRequest, is_superseded
from weft.request import (
    KEEP,
    NO_DRAFTS,
    SPECULATE,
    DraftCounts,
    FinishReason,
    PositionLogprobs,
    PromptLogprobs,
    PromptUsage,
    RequestKey,
    RequestStage,
    Retention,
    SamplingParams,
    Speculation,
    WorkerAddress,
    WorkerRole,
)
from weft.trace import Span
from weft.worker.engine_client import EngineClient, EngineSequence
from weft.worker.hidden_state_observers import PromptLogprobReader
from weft.worker.process import WorkerContext
from weft.worker.store_client import StorePrefix
from weft_services.decode.remote_prefill import PoolDeadlockDetector, RemotePrefill

logger = logging.getLogger(__name__)
MAX_US = 2**32 - 1  # limit of the wire: more than an hour
_BEFORE_DECODING = (RequestStage.ROUTED, RequestStage.RESERVED, RequestStage.PREFILLING, RequestStage.TRANSFERRING)
ItemT = TypeVar("ItemT")


class StageClock:
    """Starts when the gateway's request arrives; records the time of every stage that ends."""

    def __init__(self, remaining_seconds: float) -> None:
        self.stage = RequestStage.ROUTED
        self._since = time.perf_counter()
        self._deadline = self._since + remaining_seconds
        self._began_ns = time.time_ns()
        self._spent: dict[RequestStage, float] = {}  # in order

    @property
    def remaining_seconds(self) -> float:
        """Seconds to the request's deadline."""
        return max(self._deadline - time.perf_counter(), 0.0)

    def reach(self, stage: RequestStage) -> None:
        """Enter a stage; repeating the current one changes nothing."""
        if stage is self.stage:
            return
        now = time.perf_counter()
        self._leave(now - self._since)
        self.stage, self._since = stage, now

    def computed(self, counts: PromptCounts) -> None:
        """Record a prompt that the engine computed without waiting for KV; only the engine knows when it started."""
        if self.stage is RequestStage.ROUTED:
            self._leave(counts.queue_ms / 1000)
            self.stage = RequestStage.PREFILLING
            self._leave(counts.compute_ms / 1000)
            self.stage, self._since = RequestStage.DECODING, time.perf_counter()

    def with_times(self, usage: PromptUsage) -> PromptUsage:
        """Return the usage with the time in each stage before decoding."""
        routed, reserved, prefilling, transferring = (
            min(round(self._spent.get(stage, 0.0) * 1e6), MAX_US) for stage in _BEFORE_DECODING
        )
        return replace(
            usage, routed_us=routed, reserved_us=reserved, prefilling_us=prefilling, transferring_us=transferring
        )

    def trace(self, span: Span) -> None:
        """Add every ended stage to the span as a child."""
        start = self._began_ns
        for stage, seconds in self._spent.items():
            end = start + round(seconds * 1e9)
            span.child(stage.value, start, end)
            start = end

    def _leave(self, seconds: float) -> None:
        metrics.STAGE_SECONDS.labels(self.stage).observe(seconds)
        self._spent[self.stage] = self._spent.get(self.stage, 0.0) + seconds


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """A gateway's request. With `num_prompt_logprobs` the prompt is computed here and `prefill` must be None."""

    key: RequestKey
    decode_boot_id: str
    prefill: WorkerAddress | None
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    remaining_seconds: float
    cache_salt: bytes = b""
    resumed_tokens: int = 0
    priority: int = 0
    traceparent: str = ""
    retention: Retention = KEEP
    num_prompt_logprobs: int | None = None
    speculation: Speculation = SPECULATE


@dataclass(frozen=True, slots=True)
class SequenceFailure:
    """Why a sequence failed; `worker_id` is set only if a worker is at fault."""

    code: int
    message: str
    worker_id: str


@dataclass(frozen=True, slots=True)
class DecodeUpdate:
    """One sequence's part of a frame."""

    key: RequestKey
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt: PromptUsage | None = None
    finish_reason: FinishReason | None = None
    failure: SequenceFailure | None = None
    prompt_logprobs: PromptLogprobs | None = None
    drafts: DraftCounts = NO_DRAFTS


class Outbox(Generic[ItemT]):
    """Frames for one gateway. `put` never waits; `until_overflow` raises once the gateway reads too slowly."""

    def __init__(self, max_frames: int) -> None:
        self._frames: asyncio.Queue[list[ItemT]] = asyncio.Queue(max_frames)
        self._has_overflown = asyncio.Event()

    def put(self, frame: list[ItemT]) -> None:
        """Append a frame, or drop it if the queue is full."""
        try:
            self._frames.put_nowait(frame)
        except asyncio.QueueFull:
            self._has_overflown.set()

    async def get(self) -> list[ItemT]:
        return await self._frames.get()

    async def until_overflow(self) -> None:
        """Raise Overloaded when a frame was dropped; never returns."""
        await self._has_overflown.wait()
        raise Overloaded("the gateway reads its stream too slowly")


class DecodeSequence(EngineSequence):
    """A sequence in the engine, its gateway, and the parts of its usage."""

    def __init__(self, request: SequenceRequest, outbox: Outbox[DecodeUpdate]) -> None:
        super().__init__(request.key)
        self.request = request
        self.outbox = outbox
        # `prefill_usage`: set once the remote prefill is over. `counts`: the engine's prompt counts, until they are
        # sent.
        self.prefill_usage: PromptUsage | None = None if request.prefill else PromptUsage()
        self.counts: PromptCounts | None = None
        # Tokens of a locally computed prompt found in the store; None if it was not asked.
        self.store_tokens: int | None = None
        self.stages = StageClock(request.remaining_seconds)
        wanted = request.num_prompt_logprobs
        self.scorer = None if wanted is None else PromptLogprobReader(request.token_ids, wanted)


class SequenceManager:
    """All sequences of this worker; `client` holds them."""

    def __init__(self, context: WorkerContext, remote_prefill: RemotePrefill) -> None:
        self._engine = context.engine
        self._worker_id = context.worker_id
        self._boot_id = context.boot_id
        self._fingerprint = context.fingerprint
        self._remote_prefill = remote_prefill
        self._store_prefix = StorePrefix(context.store, context.engine.paging, context.stats)
        self.client = EngineClient[DecodeSequence](
            *(context.engine, context.events, context.grammars, WorkerRole.DECODE, context.worker_id), self._send
        )

    def _send(self, deltas: Sequence[tuple[DecodeSequence, TokenDelta]]) -> None:
        """Put one frame for each gateway that this step has tokens for."""
        frames: dict[Outbox[DecodeUpdate], list[DecodeUpdate]] = {}
        for sequence, delta in deltas:
            _send_prompt_logprobs(sequence)
            frames.setdefault(sequence.outbox, []).append(self._to_update(sequence, delta))
        for outbox, frame in frames.items():
            outbox.put(frame)

    async def run(self, request: SequenceRequest, outbox: Outbox[DecodeUpdate]) -> None:
        """Run a sequence to its end, which goes to `outbox` unless this task is cancelled.

        A second request with a running key, or one of an earlier attempt, changes nothing.
        """
        if request.key in self.client.keys or is_superseded(request.key, self.client.keys):
            return
        log.request_id.set(str(request.key))
        sequence = DecodeSequence(request, outbox)
        span = trace.start_span("decode", request.traceparent) if request.traceparent else None
        try:
            async with asyncio.timeout(request.remaining_seconds):
                with self.client.open(sequence):
                    await self._run_sequence(sequence)
        except WeftError as error:
            outbox.put([self._failed(request.key, error)])
        except TimeoutError:
            outbox.put([self._failed(request.key, DeadlineExceeded("the request's deadline has passed"))])
        except Exception:
            # A bug must not end the stream and with it the gateway's other sequences.
            logger.exception("sequence failed by a bug")
            outbox.put([self._failed(request.key, EngineFailed("internal error"))])
        finally:
            self._remote_prefill.local_prefills.end(request.key)
            sequence.stages.reach(RequestStage.FINISHED)
            if span is not None:
                sequence.stages.trace(span)
                span.set({"weft.prompt_tokens": len(request.token_ids), "weft.resumed_tokens": request.resumed_tokens})
                span.end()

    def _spec(self, sequence: DecodeSequence) -> SequenceSpec:
        """Return the sequence for the engine. Raises Incompatible or InvalidRequest."""
        request, scorer = sequence.request, sequence.scorer
        if request.decode_boot_id != self._boot_id:
            raise Incompatible("the decode worker has been restarted since the request was routed")
        if scorer is not None and request.prefill is not None:
            raise InvalidRequest(
                "prefill must be empty with num_prompt_logprobs: the decode worker computes such prompts", "prefill"
            )
        return SequenceSpec(
            key=request.key,
            token_ids=request.token_ids,
            sampling=request.sampling,
            mode=SequenceMode.GENERATE,
            cache_salt=request.cache_salt,
            wait_for_kv=scorer is None
            and (request.prefill is not None or self._store_prefix.may_have(request.token_ids)),
            resumed_tokens=request.resumed_tokens,
            priority=request.priority,
            retention=request.retention,
            observer=scorer,
            speculation=request.speculation,
        )

    async def _run_sequence(self, sequence: DecodeSequence) -> None:
        request, spec = sequence.request, self._spec(sequence)
        await self.client.submit(sequence, spec)
        if request.prefill is not None:
            reserved = await sequence.until_reserved()
            sequence.stages.reach(RequestStage.RESERVED)
            deadlock_detector = PoolDeadlockDetector(lambda: self._engine.load, self.client.keys.__len__)
            usage = await self._remote_prefill.fill(
                self._prefill_request(request, request.prefill, reserved),
                *(request.prefill, reserved, sequence.stages.reach, sequence.stages.remaining_seconds),
                deadlock_detector,
            )
            sequence.prefill_usage = usage or PromptUsage()
        elif spec.wait_for_kv:
            await self._fill(sequence)
        await sequence.until_ended()

    def _prefill_request(self, request: SequenceRequest, prefill: WorkerAddress, reserved: Reserved) -> PrefillRequest:
        return PrefillRequest(
            key=request.key,
            prefill_boot_id=prefill.boot_id,
            fingerprint=self._fingerprint,
            token_ids=request.token_ids,
            sampling=request.sampling,
            cache_salt=request.cache_salt,
            held_blocks=reserved.num_hit_tokens // self._fingerprint.block_tokens,
            resumed_tokens=request.resumed_tokens,
            priority=request.priority,
            retention=request.retention,
            is_bare=reserved.is_bare,
        )

    async def _fill(self, sequence: DecodeSequence) -> None:
        """Fill a locally computed prompt with blocks from the store."""
        request, reserved = sequence.request, await sequence.until_reserved()
        sequence.stages.reach(RequestStage.RESERVED)
        hit = await self._store_prefix.fetch(request.token_ids, request.cache_salt, reserved)
        sequence.store_tokens = hit.num_tokens
        sequence.stages.reach(RequestStage.PREFILLING)
        num_ready = reserved.num_hit_tokens + hit.num_tokens
        self._engine.complete_kv(request.key, num_ready, num_bare_tokens=hit.num_bare_tokens)

    def _to_update(self, sequence: DecodeSequence, delta: TokenDelta) -> DecodeUpdate:
        sequence.counts = delta.prompt or sequence.counts
        usage = None
        if sequence.counts is not None and sequence.prefill_usage is not None:
            usage = self._usage(sequence, sequence.counts, sequence.prefill_usage)
            sequence.counts = None
        return DecodeUpdate(delta.key, delta.token_ids, delta.logprobs, usage, delta.finish_reason, drafts=delta.drafts)

    def _usage(self, sequence: DecodeSequence, counts: PromptCounts, usage: PromptUsage) -> PromptUsage:
        """Return prefill's counts, or our own if the prompt was computed here."""
        sequence.stages.computed(counts)
        sequence.stages.reach(RequestStage.DECODING)
        usage = sequence.stages.with_times(usage)
        if usage.prefill_worker_id:
            return usage
        self._remote_prefill.local_prefills.end(sequence.request.key)
        if sequence.store_tokens is None and sequence.request.num_prompt_logprobs is None:
            self._remote_prefill.stats.on_lookup(len(sequence.request.token_ids), {Tier.POOL: counts.num_cached_tokens})
        return replace(
            usage,
            cached_tokens=counts.num_cached_tokens,
            store_tokens=min(sequence.store_tokens or 0, counts.num_cached_tokens),
            queue_ms=counts.queue_ms,
            compute_ms=counts.compute_ms,
            prefill_worker_id=self._worker_id,
        )

    def _failed(self, key: RequestKey, error: WeftError) -> DecodeUpdate:
        # An overloaded worker is not faulty, but the next attempt should go elsewhere.
        at_fault = isinstance(error, (EngineFailed, Incompatible, Overloaded))
        worker_id = error.worker_id if isinstance(error, PeerLost) else self._worker_id if at_fault else ""
        logger.warning("sequence failed error=%s", error)
        # Details of internal errors stay in the log.
        message = "the engine has failed" if isinstance(error, EngineFailed) else str(error)
        return DecodeUpdate(key, failure=SequenceFailure(error.code, message, worker_id))


def _send_prompt_logprobs(sequence: DecodeSequence) -> None:
    """Send prompt logprobs before the first token, one frame per piece."""
    if sequence.scorer is not None:
        for piece in sequence.scorer.found():
            sequence.outbox.put([DecodeUpdate(sequence.request.key, prompt_logprobs=piece)])
        sequence.scorer = None
