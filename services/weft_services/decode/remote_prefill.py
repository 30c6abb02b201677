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
from weft.asyncio_compat import cancellation_heeded
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
from weft.kv.layer_groups import PageRun
from weft.kv.transfer_protocol import Heartbeat, PrefillOrder, PromptFinished
from weft.kv.transport import TransferFailed
from weft.request import ModelFingerprint, PromptUsage, RequestKey, WorkerAddress
from weft.request_stage import Stage
from weft.worker.kv_pull import Borrower, ChecksumMismatch
from weft.worker.stats_recorder import Tally
from weft_services.decode.kv_receiver import BrokenPromise, LeaseLost, PrefillPeers, Reception
from weft_services.decode.messages import SequenceOrder
from weft_services.decode.stage_clock import StageClock

logger = logging.getLogger(__name__)
MAX_TOKENS = 8192


class Fallbacks:
    """Prompt tokens by sequence, from the failed hand-off to the first token."""

    def __init__(self) -> None:
        self._tokens: dict[RequestKey, int] = {}

    def has_room(self, num_tokens: int) -> bool:
        """`begin` would take them."""
        others = sum(self._tokens.values())
        return not others or others + num_tokens <= MAX_TOKENS

    def begin(self, key: RequestKey, num_tokens: int, lost_id: str) -> None:
        """Raises PeerLost when others fill the bound already; it names the prefill worker, if that was lost."""
        if not self.has_room(num_tokens):
            others = sum(self._tokens.values())
            raise PeerLost(f"the hand-off failed, and {others} such tokens are being computed", lost_id)
        self._tokens[key] = num_tokens
        self._observe()

    def end(self, key: RequestKey) -> None:
        """Computed, or given up; unknown keys change nothing."""
        if self._tokens.pop(key, None) is not None:
            self._observe()

    def _observe(self) -> None:
        metrics.LOCAL_PREFILL_PENDING_TOKENS.set(sum(self._tokens.values()))


class Standstill:
    """One prompt's look at its own worker, now and then while another one is to compute it.

    `load` is the engine's latest, `num_own` how many sequences decode here: whatever waits beside them is lent.
    """

    def __init__(self, load: Callable[[], EngineLoad], num_own: Callable[[], int]) -> None:
        self._load = load
        self._num_own = num_own
        self._num_made: int | None = None

    def lasts(self) -> bool:
        """Since the last look prompts of others have waited for room here, and nothing was computed."""
        load = self._load()
        is_there = not load.num_running and load.num_waiting > self._num_own()
        num_made = load.computed_prompt_tokens + load.generated_tokens if is_there else None
        self._num_made, before = num_made, self._num_made
        return num_made is not None and num_made == before


class Circle(Exception):
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
    BrokenPromise: "protocol",
    Circle: "circle",
}
_OTHER_REASON = "failed"
_EXPECTED = (WeftError, TimeoutError, TransferFailed, ChecksumMismatch, LeaseLost, BrokenPromise, Circle)


class HandOffs:
    """Fills reserved sequences with their prompts' KV."""

    def __init__(
        self, engine: Engine, peers: PrefillPeers, borrower: Borrower, fingerprint: ModelFingerprint, tally: Tally
    ) -> None:
        self.fallbacks = Fallbacks()
        self.tally = tally
        tally.expect_failures({*_REASONS.values(), _OTHER_REASON})
        self._engine = engine
        self._peers = peers
        self._borrower = borrower
        self._fingerprint = fingerprint

    async def fill(
        self, order: SequenceOrder, prefill: WorkerAddress, reserved: Reserved, stages: StageClock, still: Standstill
    ) -> PromptUsage | None:
        """Let the engine go on, with the prompt's KV in place or with the prompt to compute itself; then None, or only
        the name of a lender that was lost.

        The engine hears `filled` on every way out, as the last act before returning; where a pull was broken off, with
        all blocks named that it may still write. Raises PeerLost where prefill failed and this worker has enough of
        such prompts to compute already.
        """
        num_hit, num_tokens = reserved.num_hit_tokens, len(order.token_ids)
        if num_hit and num_tokens - num_hit <= self._fingerprint.block_tokens:
            # a last block costs less to compute than to fetch
            self._engine.complete_kv(order.key, num_hit)
            stages.reach(Stage.PREFILLING)
            return None
        reception = self._reception(order, prefill, reserved, still)
        finished = await self._receive(prefill, reception, num_hit, stages)
        if finished is None:
            stages.reach(Stage.PREFILLING)
            lost_id = prefill.worker_id if reception.is_lender_lost else ""
            self.fallbacks.begin(order.key, num_tokens - num_hit, lost_id)
            return PromptUsage(failed_worker_id=lost_id) if lost_id else None
        self._engine.complete_kv(order.key, num_tokens, FirstToken(finished.first_token_id, finished.logprobs))
        self.tally.handed_off(prefill.worker_id, reception.transferred_bytes)
        return PromptUsage(
            cached_tokens=finished.cached_tokens,
            store_tokens=finished.store_tokens,
            transferred_bytes=reception.transferred_bytes,
            queue_ms=finished.queue_ms,
            compute_ms=finished.compute_ms,
            exposed_transfer_ms=round(reception.exposed_seconds * 1000),
            prefill_worker_id=prefill.worker_id,
        )

    async def _receive(
        self, prefill: WorkerAddress, reception: Reception, num_hit: int, stages: StageClock
    ) -> PromptFinished | None:
        finished: PromptFinished | None = None
        with cancellation_heeded():
            try:
                async with self._peers.open(prefill, reception.order, stages.remaining_seconds) as call:
                    finished = await reception.receive(call, stages)
            except* _EXPECTED as group:
                error = first_leaf(group)
                reason = _REASONS.get(type(error), _OTHER_REASON)
                reception.is_lender_lost = isinstance(error, _LOST)
                self.tally.hand_off_failed(prefill.worker_id, reason)
                logger.warning("hand-off from %s thrown away (%s): %s", prefill.worker_id, reason, error)
            finally:
                if finished is None:
                    # also when cancelled: whoever cancels the sequence next finds its suspect blocks in quarantine
                    self._engine.complete_kv(reception.order.key, num_hit, suspect_blocks=reception.abandon())
        return finished

    def _hear(self, key: RequestKey, num_tokens: int, still: Standstill, event: PromptFinished | Heartbeat) -> None:
        """Raises Circle."""
        if isinstance(event, PromptFinished):
            # the client need not wait for the KV: the token is what it is, however the last blocks get here
            self._engine.set_first_token(key, FirstToken(event.first_token_id, event.logprobs))
        elif still.lasts() and self.fallbacks.has_room(num_tokens):
            raise Circle("neither side has room for what the other is to compute")

    def _reception(
        self, order: SequenceOrder, prefill: WorkerAddress, reserved: Reserved, still: Standstill
    ) -> Reception:
        prefill_order = PrefillOrder(
            key=order.key,
            prefill_boot_id=prefill.boot_id,
            fingerprint=self._fingerprint,
            token_ids=order.token_ids,
            sampling=order.sampling,
            cache_salt=order.cache_salt,
            held_blocks=reserved.num_hit_tokens // self._fingerprint.block_tokens,
            resumed_tokens=order.resumed_tokens,
            priority=order.priority,
            retention=order.retention,
        )
        num_lacking = len(order.token_ids) - reserved.num_hit_tokens
        targets, on_event = self._targets(order, reserved), partial(self._hear, order.key, num_lacking, still)
        return Reception(prefill_order, targets, prefill.address, self._borrower, on_event)

    def _targets(self, order: SequenceOrder, reserved: Reserved) -> list[PageRun]:
        """Of each group, the pages that are to be filled."""
        paging, num_hit, num_tokens = self._engine.paging, reserved.num_hit_tokens, len(order.token_ids)
        num_held = num_hit // paging.block_tokens
        targets = []
        for group, run in enumerate(reserved.page_ranges):
            lent = paging.lent(group, num_held, num_tokens, num_tokens)
            placed = paging.placed(group, run, num_held, paging.sight(num_tokens, num_tokens))
            targets.append(placed.within(lent.start, lent.stop))
        return targets


def first_leaf(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What went wrong first; the rest came of it."""
    error = group.exceptions[0]
    return first_leaf(error) if isinstance(error, BaseExceptionGroup) else error
