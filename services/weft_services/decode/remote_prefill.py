"""Prompts that are computed here because their hand-off failed: how many tokens of them one worker takes on.

The first is always taken: a lost prefill worker costs a request time, and nothing else. When a whole prefill worker's
queue comes back at once, the rest goes to another one by way of the gateway, and who generates here is spared.

Workers of both roles can wait for one another: the pool of each is held by prompts that the other is to compute, and
has no room for the other's. Whoever sees that had better compute one of its own. Knows the engine's load, no peers.

One prompt's way from a prefill worker into blocks that are reserved here, and the way out when it breaks.

Whatever breaks it, the prompt is computed here instead: slower, never wrong.
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
from weft.request import ModelFingerprint, PromptUsage, RequestKey, WorkerAddress
from weft.request_stage import RequestStage
from weft.worker.kv_pull import ChecksumMismatch, KvPuller
from weft.worker.stats_recorder import StatsRecorder
from weft_services.decode.kv_receiver import KvReceiver, LeaseLost, PrefillClient, ProtocolViolation
from weft_services.decode.messages import SequenceRequest
from weft_services.decode.stage_clock import StageClock

logger = logging.getLogger(__name__)
MAX_LOCAL_PREFILL_TOKENS = 8192


class LocalPrefillBudget:
    """Prompt tokens by sequence, from the failed hand-off to the first token."""

    def __init__(self) -> None:
        self._tokens: dict[RequestKey, int] = {}

    def has_room(self, num_tokens: int) -> bool:
        """`begin` would take them."""
        others = sum(self._tokens.values())
        return not others or others + num_tokens <= MAX_LOCAL_PREFILL_TOKENS

    def begin(self, key: RequestKey, num_tokens: int, lost_worker_id: str) -> None:
        """Raises PeerLost when others fill the bound already; it names the prefill worker, if that was lost."""
        if not self.has_room(num_tokens):
            others = sum(self._tokens.values())
            raise PeerLost(f"the hand-off failed, and {others} such tokens are being computed", lost_worker_id)
        self._tokens[key] = num_tokens
        self._observe()

    def end(self, key: RequestKey) -> None:
        """Computed, or given up; unknown keys change nothing."""
        if self._tokens.pop(key, None) is not None:
            self._observe()

    def _observe(self) -> None:
        metrics.LOCAL_PREFILL_PENDING_TOKENS.set(sum(self._tokens.values()))


class PoolDeadlockDetector:
    """One prompt's look at its own worker, now and then while another one is to compute it.

    `load` is the engine's latest, `num_own` how many sequences decode here: whatever waits beside them is lent.
    """

    def __init__(self, load: Callable[[], EngineLoad], num_own: Callable[[], int]) -> None:
        self._load = load
        self._num_own = num_own
        self._num_made: int | None = None

    def is_deadlocked(self) -> bool:
        """Since the last look prompts of others have waited for room here, and nothing was computed."""
        load = self._load()
        is_there = not load.num_running and load.num_waiting > self._num_own()
        num_made = load.computed_prompt_tokens + load.generated_tokens if is_there else None
        self._num_made, before = num_made, self._num_made
        return num_made is not None and num_made == before


class PoolDeadlock(Exception):
    """The lender has no room, and nor have we for what others are to borrow: somebody has to begin."""


# what the lender is to blame for: others should not be sent to it for a while
_LOST = (PeerLost, Cancelled, DeadlineExceeded, TimeoutError)
_REASONS: dict[type[BaseException], str] = {
    PeerLost: "peer_lost",
    Cancelled: "peer_lost",
    Overloaded: "overloaded",
    Incompatible: "incompatible",
    BadCheckpoint: "incompatible",  # as FAILED_PRECONDITION comes back from the wire
    DeadlineExceeded: "timeout",
    TimeoutError: "timeout",
    TransferFailed: "transfer",
    ChecksumMismatch: "checksum",
    LeaseLost: "lease_lost",
    NotFound: "lease_lost",
    ProtocolViolation: "protocol",
    PoolDeadlock: "circle",
}
_OTHER_REASON = "failed"
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
        """Let the engine go on, with the prompt's KV in place or with the prompt to compute itself; then None, or only
        the name of a lender that was lost.

        The engine hears `filled` on every way out, as the last act before returning; where a pull was broken off, with
        all blocks named that it may still write. Raises PeerLost where prefill failed and this worker has enough of
        such prompts to compute already.
        """
        num_hit, num_tokens = reserved.num_hit_tokens, len(request.token_ids)
        if num_hit and num_tokens - num_hit <= self._fingerprint.block_tokens:
            # a last block costs less to compute than to fetch
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
                logger.warning("hand-off from %s thrown away (%s): %s", prefill.worker_id, reason, error)
            finally:
                if finished is None:
                    # also when cancelled: whoever cancels the sequence next finds its suspect blocks in quarantine
                    self._engine.complete_kv(receiver.request.key, num_hit, suspect_blocks=receiver.abort())
        return finished

    def _on_event(
        self,
        key: RequestKey,
        num_tokens: int,
        deadlock_detector: PoolDeadlockDetector,
        event: PromptFinished | Heartbeat,
    ) -> None:
        """Raises Circle."""
        if isinstance(event, PromptFinished):
            # the client need not wait for the KV: the token is what it is, however the last blocks get here
            self._engine.set_first_token(key, FirstToken(event.first_token_id, event.logprobs))
        elif deadlock_detector.is_deadlocked() and self.local_prefills.has_room(num_tokens):
            raise PoolDeadlock("neither side has room for what the other is to compute")

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
        """Of each group, the pages that are to be filled."""
        paging, num_hit, num_tokens = self._engine.paging, reserved.num_hit_tokens, len(request.token_ids)
        num_held = num_hit // paging.block_tokens
        targets = []
        for group, run in enumerate(reserved.page_ranges):
            needed = paging.needed_blocks(group, num_held, num_tokens, num_tokens)
            remapped = paging.remap(group, run, num_held, paging.retention_point(num_tokens, num_tokens))
            targets.append(remapped.within(needed.start, needed.stop))
        return targets


def first_leaf(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What went wrong first; the rest came of it."""
    error = group.exceptions[0]
    return first_leaf(error) if isinstance(error, BaseExceptionGroup) else error
