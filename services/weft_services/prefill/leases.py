"""Leases of prompts for decode workers: one KvLease a call, from the request to decode's last message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from weft import metrics
from weft.engine.engine import Engine
from weft.engine.messages import PromptProgress, Reserved, SequenceMode, SequenceSpec, StepOutput, TokenDelta
from weft.errors import Cancelled, Incompatible, InvalidRequest, NotFound, PeerLost, WeftError
from weft.kv.layer_groups import PageRange, PagingPolicy
from weft.kv.memory import BlockBytes
from weft.kv.transfer_protocol import PrefillEvent, PrefillRequest, PromptFinished, ReadyBlocks, is_superseded
from weft.request import ModelFingerprint, RequestKey
from weft.worker.engine_client import GrammarCompiler
from weft.worker.kv_pull import block_checksums
from weft.worker.store_client import StorePrefix

metrics.init_series(metrics.LEASES, ("returned", "cancelled", "expired", "broken", "stalled"))


class KvLease:
    """One prompt: how far it is computed, and which of its blocks have been announced."""

    def __init__(self, request: PrefillRequest) -> None:
        self.request = request
        self.store_tokens = 0
        self.announced_blocks: set[int] = set()
        self.is_accepted = False  # decode knows the renewal interval
        # End of the lease, for the metric; a broken stream leaves the default.
        self.end = "broken"
        self.is_begun = False  # submitted to the engine
        self._reserved: Reserved | None = None
        self._progress: PromptProgress | None = None
        self._first: TokenDelta | None = None
        self._failure: WeftError | None = None
        self._changed = asyncio.Event()

    def on_reserved(self, reserved: Reserved) -> None:
        """The engine has admitted the prompt."""
        self._reserved = reserved
        self._changed.set()

    def on_progress(self, progress: PromptProgress) -> None:
        """More blocks of the prompt are final."""
        self._progress = progress
        self._changed.set()

    def on_first_token(self, first: TokenDelta) -> None:
        """The whole prompt is computed."""
        self._first = first
        self._changed.set()

    def fail(self, error: WeftError) -> None:
        """End the lease: waiting tasks raise `error`."""
        self._failure = error
        self._changed.set()

    def dismiss(self) -> None:
        """Decode is done. Before the prompt is, decode no longer needs it."""
        self.end = "cancelled" if self._first is None else "returned"
        if self._first is None:
            self.fail(Cancelled("decode no longer needs the prompt"))

    async def until_reserved(self) -> Reserved:
        """Wait for admission. Raises the engine's rejection."""
        while self._reserved is None:
            await self._change()
        return self._reserved

    async def events(
        self, memory: BlockBytes, paging: PagingPolicy, with_checksums: bool
    ) -> AsyncIterator[PrefillEvent]:
        """Yield blocks as they become final, without those that decode holds.

        The prompt's end comes before the last blocks: its token need not wait for their checksums.
        """
        held, num_tokens = self.request.held_blocks, len(self.request.token_ids)
        next_index = [
            paging.needed_blocks(group, held, num_tokens, num_tokens).start for group in range(len(paging.spans))
        ]
        while True:
            # Read before the progress: once the first token exists, the progress is complete.
            first = self._first
            if first is not None:
                yield self._finished(first)
            for group, run in self._final_runs(paging, first is not None):
                if run.end > next_index[group]:
                    blocks = run.within(next_index[group], run.end).blocks
                    self.announced_blocks.update(blocks)
                    sums = await block_checksums(memory, blocks) if with_checksums else []
                    yield ReadyBlocks(next_index[group], blocks, tuple(sums), group)
                    next_index[group] = run.end
            if first is not None:
                return
            await self._change()

    def _final_runs(self, paging: PagingPolicy, is_complete: bool) -> list[tuple[int, PageRange]]:
        """Return the readable pages of each group; a partial last block only at the end."""
        if self._progress is None:
            return []
        num_final = self._progress.num_ready_tokens // paging.block_tokens
        end = paging.num_blocks(len(self.request.token_ids)) if is_complete else num_final
        return [(group, run.within(run.first, end)) for group, run in enumerate(self._progress.page_ranges)]

    def _finished(self, first: TokenDelta) -> PromptFinished:
        assert first.prompt is not None
        return PromptFinished(
            first_token_id=first.token_ids[0],
            logprobs=first.logprobs[0] if first.logprobs else None,
            cached_tokens=first.prompt.num_cached_tokens,
            store_tokens=min(self.store_tokens, first.prompt.num_cached_tokens),
            queue_ms=first.prompt.queue_ms,
            compute_ms=first.prompt.compute_ms,
        )

    async def _change(self) -> None:
        await self._changed.wait()
        self._changed.clear()
        if self._failure is not None:
            raise self._failure


class LeaseManager:
    """All leases of this worker. Subscribe `on_step` to the engine's events."""

    def __init__(
        self,
        engine: Engine,
        store: StorePrefix,
        boot_id: str,
        fingerprint: ModelFingerprint,
        grammars: GrammarCompiler,
    ) -> None:
        self._engine = engine
        self._store = store
        self._boot_id = boot_id
        self._fingerprint = fingerprint
        self._grammars = grammars
        self._leases: dict[RequestKey, KvLease] = {}
        self._is_open = True
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def close(self) -> None:
        """Reject new requests; running leases continue."""
        self._is_open = False

    @property
    def is_stalled(self) -> bool:
        """True if the engine's thread hangs, so no prompt will finish."""
        return self._engine.watchdog.is_hung

    @property
    def paging(self) -> PagingPolicy:
        return self._engine.paging

    async def until_idle(self) -> None:
        """Wait until all leases have ended."""
        await self._is_idle.wait()

    def on_step(self, output: StepOutput) -> None:
        """Handle engine events; keys of other components are ignored."""
        for reserved in output.reserved:
            if lease := self._leases.get(reserved.key):
                lease.on_reserved(reserved)
        for progress in output.progress:
            if lease := self._leases.get(progress.key):
                lease.on_progress(progress)
        for delta in output.deltas:
            if lease := self._leases.get(delta.key):
                lease.on_first_token(delta)
        for failure in output.failures:
            if lease := self._leases.get(failure.key):
                lease.fail(failure.error)

    @asynccontextmanager
    async def open(self, request: PrefillRequest) -> AsyncIterator[KvLease]:
        """Hold the blocks that `begin` computes until the scope ends.

        Raises Incompatible, InvalidRequest or PeerLost.
        """
        self._check(request)
        self._leases[request.key] = lease = KvLease(request)
        self._is_idle.clear()
        try:
            yield lease
        finally:
            del self._leases[request.key]
            if not self._leases:
                self._is_idle.set()
            if lease.is_begun:  # A request rejected earlier held nothing and does not count.
                self._engine.release(request.key)
                metrics.LEASES.labels(lease.end).inc()

    async def begin(self, lease: KvLease) -> None:
        """Submit the prompt. Raises Incompatible, InvalidRequest or Overloaded.

        Compiles its grammar first. The first grammar may take seconds; the lease is alive meanwhile.
        """
        request = lease.request
        spec = SequenceSpec(
            key=request.key,
            token_ids=request.token_ids,
            sampling=request.sampling,
            mode=SequenceMode.PREFILL,
            cache_salt=request.cache_salt,
            wait_for_kv=True,
            resumed_tokens=request.resumed_tokens,
            constraint=await self._grammars.compile(request.sampling.grammar),
            priority=request.priority,
            retention=request.retention,
        )
        self._engine.submit(spec)
        lease.is_begun = True

    async def fill(self, lease: KvLease) -> None:
        """Fill blocks from the store, then let the engine compute the rest."""
        reserved = await lease.until_reserved()
        request = lease.request
        lease.store_tokens = sum((await self._store.fetch(request.token_ids, request.cache_salt, reserved)).values())
        self._engine.complete_kv(request.key, reserved.num_hit_tokens + lease.store_tokens)

    def find(self, key: RequestKey) -> KvLease:
        """Return a live lease. Raises NotFound."""
        lease = self._leases.get(key)
        if lease is None:
            raise NotFound("no live lease has this key")
        return lease

    def _check(self, request: PrefillRequest) -> None:
        if not self._is_open:
            raise PeerLost("this prefill worker is shutting down")
        if request.prefill_boot_id != self._boot_id:
            raise Incompatible("the prefill worker has been restarted since the request was routed")
        if (difference := self._fingerprint.difference(request.fingerprint)) is not None:
            raise Incompatible(f"prefill and decode differ in {difference}")
        if is_superseded(request.key, self._leases):
            raise InvalidRequest("a later attempt at the request is running")
        if request.key in self._leases:
            raise InvalidRequest("this attempt is already running")
