"""One prompt's way from a prefill worker into blocks that are reserved here, and the way out when it breaks.

Whatever breaks it, the prompt is computed here instead: slower, never wrong.
"""

from __future__ import annotations

import asyncio
import logging
import time

from weft import metrics
from weft.engine.core import Engine
from weft.engine.messages import FirstToken, Reserved
from weft.errors import BadCheckpoint, Cancelled, DeadlineExceeded, Incompatible, Overloaded, PeerLost, WeftError
from weft.kv.groups import PageRun
from weft.kv.handoff import Accepted, LeaseClosed, PrefillOrder, PromptFinished, ReadyBlocks
from weft.kv.transport import Lender, TransferFailed
from weft.request import ModelFingerprint, PromptUsage, WorkerAddress
from weft.worker.borrow import BlockCopy, Borrower, Borrowing, ChecksumMismatch
from weft_services.decode.order import SequenceOrder
from weft_services.decode.peers import PrefillCall, PrefillPeers

logger = logging.getLogger(__name__)
PULL_SECONDS = 30.0
CLOSING_SECONDS = 5.0


class LeaseLost(Exception):
    """The lender took blocks back while we read."""


class BrokenPromise(Exception):
    """The lender announced what cannot be, or less than the prompt."""


# what the lender is to blame for: others should not be sent to it for a while
_LOST = (PeerLost, Cancelled, DeadlineExceeded, TimeoutError)
_REASONS: dict[type[Exception], str] = {
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
    BrokenPromise: "protocol",
}


class HandOffs:
    """Fills reserved sequences with their prompts' KV."""

    def __init__(self, engine: Engine, peers: PrefillPeers, borrower: Borrower, fingerprint: ModelFingerprint) -> None:
        self._engine = engine
        self._peers = peers
        self._borrower = borrower
        self._fingerprint = fingerprint

    async def fill(
        self, order: SequenceOrder, prefill: WorkerAddress, reserved: Reserved, deadline: float
    ) -> PromptUsage | None:
        """Let the engine go on, with the prompt's KV in place or with the prompt to compute itself; then None, or only
        the name of a lender that was lost. `deadline` in the loop's time.

        The engine hears `filled` on every way out, as the last act before returning; where a pull was broken off, with
        all blocks named that it may still write.
        """
        num_hit, num_tokens = reserved.num_hit_tokens, len(order.token_ids)
        if num_hit and num_tokens - num_hit <= self._fingerprint.block_tokens:
            # a last block costs less to compute than to fetch
            self._engine.filled(order.key, num_hit)
            return None
        reception = self._reception(order, prefill, reserved)
        finished = await self._receive(prefill, reception, num_hit, deadline)
        if finished is None:
            return PromptUsage(failed_worker_id=prefill.worker_id) if reception.is_lender_lost else None
        self._engine.filled(order.key, num_tokens, FirstToken(finished.first_token_id, finished.logprobs))
        return PromptUsage(
            cached_tokens=finished.cached_tokens,
            store_tokens=finished.store_tokens,
            transferred_bytes=reception.transferred_bytes,
            queue_ms=finished.queue_ms,
            compute_ms=finished.compute_ms,
            exposed_transfer_ms=reception.exposed_ms,
            prefill_worker_id=prefill.worker_id,
        )

    async def _receive(
        self, prefill: WorkerAddress, reception: _Reception, num_hit: int, deadline: float
    ) -> PromptFinished | None:
        finished: PromptFinished | None = None
        remaining = max(deadline - asyncio.get_running_loop().time(), 0.0)
        try:
            async with self._peers.open(prefill, reception.order, remaining) as call:
                finished = await reception.receive(call)
        except (WeftError, TimeoutError, TransferFailed, ChecksumMismatch, LeaseLost, BrokenPromise) as error:
            reason = _REASONS.get(type(error), "failed")
            reception.is_lender_lost = isinstance(error, _LOST)
            metrics.TRANSFER_FAILURES.labels(reason).inc()
            logger.warning("hand-off from %s thrown away (%s): %s", prefill.worker_id, reason, error)
        finally:
            if finished is None:
                # also when cancelled: whoever cancels the sequence next finds its suspect blocks in quarantine
                self._engine.filled(reception.order.key, num_hit, suspect_blocks=reception.abandon())
        return finished

    def _reception(self, order: SequenceOrder, prefill: WorkerAddress, reserved: Reserved) -> _Reception:
        prefill_order = PrefillOrder(
            key=order.key,
            prefill_boot_id=prefill.boot_id,
            fingerprint=self._fingerprint,
            token_ids=order.token_ids,
            sampling=order.sampling,
            cache_salt=order.cache_salt,
            held_blocks=reserved.num_hit_tokens // self._fingerprint.block_tokens,
            resumed_tokens=order.resumed_tokens,
        )
        return _Reception(prefill_order, self._targets(order, reserved), prefill.address, self._borrower)

    def _targets(self, order: SequenceOrder, reserved: Reserved) -> list[PageRun]:
        """Of each group, the pages that are to be filled."""
        paging, num_hit, num_tokens = self._engine.paging, reserved.num_hit_tokens, len(order.token_ids)
        num_held = num_hit // paging.block_tokens
        targets = []
        for group, run in enumerate(reserved.runs):
            lent = paging.lent(group, num_held, num_tokens)
            targets.append(paging.placed(group, run, num_held, num_tokens).within(lent.start, lent.stop))
        return targets


class _Reception:
    """Takes one lender's blocks, group by group and position by position, into `targets`."""

    def __init__(self, order: PrefillOrder, targets: list[PageRun], address: str, borrower: Borrower) -> None:
        self.order = order
        self.exposed_ms = 0
        self.is_lender_lost = False
        self._targets = targets
        self._address = address
        self._borrower = borrower
        self._borrowing: Borrowing | None = None
        self._next_index = [run.first for run in targets]

    @property
    def transferred_bytes(self) -> int:
        """So far."""
        return self._borrowing.transferred_bytes if self._borrowing else 0

    async def receive(self, call: PrefillCall) -> PromptFinished:
        """Everything, to the lender's word that the lease held."""
        finished: PromptFinished | None = None
        async with asyncio.timeout(None) as patience:
            async for event in call.events():
                match event:
                    case Accepted():
                        self._accept(event, call)
                    case ReadyBlocks():
                        await self._take(event)
                    case PromptFinished():
                        if self._next_index != [run.end for run in self._targets]:
                            raise BrokenPromise(f"blocks were lent up to {self._next_index} of each group, and no more")
                        finished = event
                        call.finish()
                        patience.reschedule(asyncio.get_running_loop().time() + CLOSING_SECONDS)
                    case LeaseClosed():
                        if finished is None or not event.lease_held:
                            raise LeaseLost("the lender took blocks back")
                        return finished
        raise PeerLost("the lender ended the call early")

    def abandon(self) -> tuple[int, ...]:
        """The blocks that a pull may still write."""
        return self._borrowing.abandon() if self._borrowing else ()

    def _accept(self, event: Accepted, call: PrefillCall) -> None:
        if event.boot_id != self.order.prefill_boot_id:
            raise Incompatible("another boot of the prefill worker answered")
        self._borrowing = self._borrower.borrow(Lender(event.endpoint, self._address, self.order.key))
        call.keep_alive(event.lease_ms)

    async def _take(self, event: ReadyBlocks) -> None:
        end, group = event.first_index + len(event.blocks), event.group
        if self._borrowing is None or group >= len(self._targets):
            raise BrokenPromise(f"blocks of group {group} were lent, of {len(self._targets)}")
        if event.first_index != self._next_index[group] or end > self._targets[group].end:
            raise BrokenPromise(f"blocks {event.first_index} to {end} were lent, {self._next_index} were to come next")
        if event.checksums and len(event.checksums) != len(event.blocks):
            raise BrokenPromise(f"{len(event.blocks)} blocks came with {len(event.checksums)} checksums")
        started = time.perf_counter()
        sums = event.checksums or (None,) * len(event.blocks)
        targets = self._targets[group].within(event.first_index, end).blocks
        copies = [BlockCopy(*each) for each in zip(event.blocks, targets, sums, strict=True)]
        await self._borrowing.pull(copies, PULL_SECONDS)
        self._next_index[group] = end
        # the last time is the one that counts, groups together: everything before it was hidden behind the computing
        self.exposed_ms = round((time.perf_counter() - started) * 1000) + (self.exposed_ms if group else 0)
