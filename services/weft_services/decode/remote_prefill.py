"""Fills reserved sequences with KV from a prefill worker, and falls back to local prefill when that fails.

Failed transfers make a request slower, never wrong. The budget bounds local prefills: the first is always taken, so
losing a prefill worker costs only time. When a whole worker's queue comes back at once, the rest returns to the
gateway, which protects decoding sequences.

Workers with both roles can deadlock: the pool of each is held by prompts that the other must compute. A worker that
detects this computes one of its own prompts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from weft import metrics
from weft.asyncio_compat import reraise_lost_cancellation
from weft.engine.engine import Engine
from weft.engine.messages import EngineLoad, FirstToken, Reserved
from weft.errors import (
    BadCheckpoint,
    Cancelled,
    DeadlineExceeded,
    Incompatible,
    NotFound,
    Overloaded,
    PeerLost,
    WeftError,
)
from weft.kv.layer_groups import PageRange
from weft.kv.transfer_protocol import Heartbeat, PrefillRequest, PromptFinished
from weft.kv.transport import TransferFailed
from weft.request import ModelFingerprint, PromptUsage, RequestKey, RequestStage, WorkerAddress
from weft.worker.kv_pull import ChecksumMismatch, KvPuller
from weft.worker.stats_recorder import StatsRecorder
from weft_services.decode.kv_receiver import KvReceiver, LeaseLost, PrefillClient, ProtocolViolation
from weft_services.decode.messages import SequenceRequest
from weft_services.decode.stage_clock import StageClock

logger = logging.getLogger(__name__)
MAX_LOCAL_PREFILL_TOKENS = 8192
# Failures of the prefill worker: gateways should avoid it for a while.
_LOST = (PeerLost, Cancelled, DeadlineExceeded, TimeoutError)
_OTHER_REASON = "failed"


class LocalPrefillBudget:
    """Prompt tokens of local prefills, from the failed transfer to the first token."""

    def __init__(self) -> None:
        self._tokens: dict[RequestKey, int] = {}

    def has_room(self, num_tokens: int) -> bool:
        """True if `begin` would accept."""
        others = sum(self._tokens.values())
        return not others or others + num_tokens <= MAX_LOCAL_PREFILL_TOKENS

    def begin(self, key: RequestKey, num_tokens: int, lost_worker_id: str) -> None:
        """Add a local prefill. Raises PeerLost if the budget is full, naming a lost prefill worker."""
        if not self.has_room(num_tokens):
            others = sum(self._tokens.values())
            raise PeerLost(
                f"the kv transfer failed and {others} tokens of local prefills are already running", lost_worker_id
            )
        self._tokens[key] = num_tokens
        self._observe()

    def end(self, key: RequestKey) -> None:
        """Remove a finished or abandoned prefill; unknown keys change nothing."""
        if self._tokens.pop(key, None) is not None:
            self._observe()

    def _observe(self) -> None:
        metrics.LOCAL_PREFILL_PENDING_TOKENS.set(sum(self._tokens.values()))


class PoolDeadlockDetector:
    """Checks the local worker periodically while another worker computes a prompt.

    - `load`: returns the engine's latest load.
    - `num_own`: number of sequences decoding here; any other waiting prompt belongs to a peer.
    """

    def __init__(self, load: Callable[[], EngineLoad], num_own: Callable[[], int]) -> None:
        self._load = load
        self._num_own = num_own
        self._num_made: int | None = None

    def is_deadlocked(self) -> bool:
        """True if since the last check prompts of peers waited for room and nothing was computed."""
        load = self._load()
        is_there = not load.num_running and load.num_waiting > self._num_own()
        num_made = load.computed_prompt_tokens + load.generated_tokens if is_there else None
        self._num_made, before = num_made, self._num_made
        return num_made is not None and num_made == before


class PoolDeadlock(Exception):
    """Neither side has room for the prompts that the other must compute."""


_REASONS: dict[type[BaseException], str] = {
    PeerLost: "peer_lost",
    Cancelled: "peer_lost",
    Overloaded: "overloaded",
    Incompatible: "incompatible",
    BadCheckpoint: "incompatible",  # FAILED_PRECONDITION maps to this
    DeadlineExceeded: "timeout",
    TimeoutError: "timeout",
    TransferFailed: "transfer",
    ChecksumMismatch: "checksum",
    LeaseLost: "lease_lost",
    NotFound: "lease_lost",
    ProtocolViolation: "protocol",
    PoolDeadlock: "circle",
}
_EXPECTED = (WeftError, TimeoutError, TransferFailed, ChecksumMismatch, LeaseLost, ProtocolViolation, PoolDeadlock)


class RemotePrefill:
    """Fills reserved sequences with their prompts' KV."""

    def __init__(
        self,
        engine: Engine,
        prefill_client: PrefillClient,
        puller: KvPuller,
        fingerprint: ModelFingerprint,
        stats: StatsRecorder,
    ) -> None:
        self.local_prefills = LocalPrefillBudget()
        self.stats = stats
        stats.declare_failures({*_REASONS.values(), _OTHER_REASON})
        self._engine = engine
        self._prefill_client = prefill_client
        self._puller = puller
        self._fingerprint = fingerprint

    async def fill(
        self,
        request: SequenceRequest,
        prefill: WorkerAddress,
        reserved: Reserved,
        stages: StageClock,
        deadlock_detector: PoolDeadlockDetector,
    ) -> PromptUsage | None:
        """Transfer the prompt's KV, or let the engine compute the prompt.

        Returns None for a local prefill, or a usage that only names a lost prefill worker. Every path calls
        `complete_kv` as its last act. After an aborted pull it names all blocks that the pull may still write. Raises
        PeerLost if the transfer failed and the local prefill budget is full.
        """
        num_hit, num_tokens = reserved.num_hit_tokens, len(request.token_ids)
        if num_hit and num_tokens - num_hit <= self._fingerprint.block_tokens:
            # Computing the last block is cheaper than fetching it.
            self._engine.complete_kv(request.key, num_hit)
            stages.reach(RequestStage.PREFILLING)
            return None
        receiver = self._receiver(request, prefill, reserved, deadlock_detector)
        finished = await self._receive(prefill, receiver, num_hit, stages)
        if finished is None:
            stages.reach(RequestStage.PREFILLING)
            lost_worker_id = prefill.worker_id if receiver.is_prefill_lost else ""
            self.local_prefills.begin(request.key, num_tokens - num_hit, lost_worker_id)
            return PromptUsage(failed_worker_id=lost_worker_id) if lost_worker_id else None
        self._engine.complete_kv(request.key, num_tokens, FirstToken(finished.first_token_id, finished.logprobs))
        self.stats.on_transfer(prefill.worker_id, receiver.transferred_bytes)
        return PromptUsage(
            cached_tokens=finished.cached_tokens,
            store_tokens=finished.store_tokens,
            transferred_bytes=receiver.transferred_bytes,
            queue_ms=finished.queue_ms,
            compute_ms=finished.compute_ms,
            exposed_transfer_ms=round(receiver.exposed_seconds * 1000),
            prefill_worker_id=prefill.worker_id,
        )

    async def _receive(
        self, prefill: WorkerAddress, receiver: KvReceiver, num_hit: int, stages: StageClock
    ) -> PromptFinished | None:
        finished: PromptFinished | None = None
        with reraise_lost_cancellation():
            try:
                async with self._prefill_client.open(prefill, receiver.request, stages.remaining_seconds) as call:
                    finished = await receiver.receive(call, stages)
            except* _EXPECTED as group:
                error = first_leaf(group)
                reason = _REASONS.get(type(error), _OTHER_REASON)
                receiver.is_prefill_lost = isinstance(error, _LOST)
                self.stats.on_transfer_failed(prefill.worker_id, reason)
                logger.warning(
                    "kv transfer discarded prefill_worker=%s reason=%s error=%s", prefill.worker_id, reason, error
                )
            finally:
                if finished is None:
                    # Also when cancelled: the blocks must be quarantined before the sequence is cancelled.
                    self._engine.complete_kv(receiver.request.key, num_hit, suspect_blocks=receiver.abort())
        return finished

    def _on_event(
        self,
        key: RequestKey,
        num_tokens: int,
        deadlock_detector: PoolDeadlockDetector,
        event: PromptFinished | Heartbeat,
    ) -> None:
        if isinstance(event, PromptFinished):
            # The client need not wait for the KV: the first token no longer depends on it.
            self._engine.set_first_token(key, FirstToken(event.first_token_id, event.logprobs))
        elif deadlock_detector.is_deadlocked() and self.local_prefills.has_room(num_tokens):
            raise PoolDeadlock("neither pool has room for the other's prompts")

    def _receiver(
        self,
        request: SequenceRequest,
        prefill: WorkerAddress,
        reserved: Reserved,
        deadlock_detector: PoolDeadlockDetector,
    ) -> KvReceiver:
        prefill_request = PrefillRequest(
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
        )
        num_lacking = len(request.token_ids) - reserved.num_hit_tokens
        targets, on_event = (
            self._targets(request, reserved),
            partial(self._on_event, request.key, num_lacking, deadlock_detector),
        )
        return KvReceiver(prefill_request, targets, prefill.address, self._puller, on_event)

    def _targets(self, request: SequenceRequest, reserved: Reserved) -> list[PageRange]:
        """Return the pages to fill, by layer group."""
        paging, num_hit, num_tokens = self._engine.paging, reserved.num_hit_tokens, len(request.token_ids)
        num_held = num_hit // paging.block_tokens
        targets = []
        for group, run in enumerate(reserved.page_ranges):
            needed = paging.needed_blocks(group, num_held, num_tokens, num_tokens)
            remapped = paging.remap(group, run, num_held, paging.retention_point(num_tokens, num_tokens))
            targets.append(remapped.within(needed.start, needed.stop))
        return targets


def first_leaf(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first exception of a group; the others are consequences."""
    error = group.exceptions[0]
    return first_leaf(error) if isinstance(error, BaseExceptionGroup) else error
