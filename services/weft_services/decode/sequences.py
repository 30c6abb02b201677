"""Sequences on the decode worker: submitted, filled by prefill or computed here, generating, ended.

Every sequence has one task and one exit, where the engine releases it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

from weft import log, trace
from weft.engine.messages import PromptCounts, SequenceMode, SequenceSpec, TokenDelta
from weft.errors import (
    DeadlineExceeded,
    EngineFailed,
    Incompatible,
    InvalidRequest,
    Overloaded,
    PeerLost,
    WeftError,
)
from weft.kv.tiers import Tier
from weft.kv.transfer_protocol import is_superseded
from weft.request import PromptUsage, RequestKey, RequestStage, WorkerRole
from weft.worker.engine_client import EngineClient, EngineSequence
from weft.worker.hidden_state_observers import PromptLogprobReader
from weft.worker.process import WorkerContext
from weft.worker.store_client import StorePrefix
from weft_services.decode.messages import DecodeUpdate, Outbox, SequenceFailure, SequenceRequest
from weft_services.decode.remote_prefill import PoolDeadlockDetector, RemotePrefill
from weft_services.decode.stage_clock import StageClock

logger = logging.getLogger(__name__)


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
        )

    async def _run_sequence(self, sequence: DecodeSequence) -> None:
        request, spec = sequence.request, self._spec(sequence)
        await self.client.submit(sequence, spec)
        if request.prefill is not None:
            reserved = await sequence.until_reserved()
            sequence.stages.reach(RequestStage.RESERVED)
            deadlock_detector = PoolDeadlockDetector(lambda: self._engine.load, self.client.keys.__len__)
            usage = await self._remote_prefill.fill(
                request, request.prefill, reserved, sequence.stages, deadlock_detector
            )
            sequence.prefill_usage = usage or PromptUsage()
        elif spec.wait_for_kv:
            await self._fill(sequence)
        await sequence.until_ended()

    async def _fill(self, sequence: DecodeSequence) -> None:
        """Fill a locally computed prompt with blocks from the store."""
        request, reserved = sequence.request, await sequence.until_reserved()
        sequence.stages.reach(RequestStage.RESERVED)
        found = await self._store_prefix.fetch(request.token_ids, request.cache_salt, reserved)
        sequence.store_tokens = sum(found.values())
        sequence.stages.reach(RequestStage.PREFILLING)
        self._engine.complete_kv(request.key, reserved.num_hit_tokens + sequence.store_tokens)

    def _to_update(self, sequence: DecodeSequence, delta: TokenDelta) -> DecodeUpdate:
        sequence.counts = delta.prompt or sequence.counts
        usage = None
        if sequence.counts is not None and sequence.prefill_usage is not None:
            usage = self._usage(sequence, sequence.counts, sequence.prefill_usage)
            sequence.counts = None
        return DecodeUpdate(delta.key, delta.token_ids, delta.logprobs, usage, delta.finish_reason)

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
