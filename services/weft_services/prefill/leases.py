"""Leases of prompts for decode workers: one KvLease a call, from the request to decode's last message."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from weft import metrics
from weft.engine.engine import Engine
from weft.engine.messages import PromptProgress, SequenceMode, SequenceSpec, TokenDelta
from weft.errors import Cancelled, Incompatible, InvalidRequest, NotFound, PeerLost
from weft.kv.layer_groups import PageRange, PagingPolicy
from weft.kv.memory import BlockBytes
from weft.kv.transfer_protocol import PrefillEvent, PrefillRequest, PromptFinished, ReadyBlocks, is_superseded
from weft.request import ModelFingerprint, RequestKey
from weft.worker.engine_client import EngineClient, EngineSequence
from weft.worker.kv_pull import block_checksums
from weft.worker.store_client import StorePrefix

metrics.init_series(metrics.LEASES, ("returned", "cancelled", "expired", "broken", "stalled"))


class KvLease(EngineSequence):
    """One prompt in the engine, and which of its blocks have been announced."""

    def __init__(self, request: PrefillRequest) -> None:
        super().__init__(request.key)
        self.request = request
        self.store_tokens = 0
        self.announced_blocks: set[int] = set()
        self.is_accepted = False  # decode knows the renewal interval
        self.is_finished = False  # the prompt is computed
        # End of the lease, for the metric; a broken stream leaves the default.
        self.end = "broken"

    def dismiss(self) -> None:
        """Decode is done. Before the prompt is, decode no longer needs it."""
        self.end = "returned" if self.is_finished else "cancelled"
        if not self.is_finished:
            self.fail(Cancelled("decode no longer needs the prompt"))

    async def prefill_events(
        self, memory: BlockBytes, paging: PagingPolicy, with_checksums: bool
    ) -> AsyncIterator[PrefillEvent]:
        """Yield blocks as they become final, without those that decode holds.

        The prompt's end comes before the last blocks: its token need not wait for their checksums.
        """
        held, num_tokens = self.request.held_blocks, len(self.request.token_ids)
        next_index = [
            paging.needed_blocks(group, held, num_tokens, num_tokens).start for group in range(len(paging.spans))
        ]
        # The engine reports progress also in the step of the first token.
        async for event in self.events():
            if isinstance(event, TokenDelta):
                self.is_finished = True
                yield self._finished(event)
                continue
            for group, run in self._final_runs(paging, event):
                if run.end > next_index[group]:
                    blocks = run.within(next_index[group], run.end).blocks
                    self.announced_blocks.update(blocks)
                    sums = await block_checksums(memory, blocks) if with_checksums else []
                    yield ReadyBlocks(next_index[group], blocks, tuple(sums), group)
                    next_index[group] = run.end
            if self.is_finished:
                return

    def _final_runs(self, paging: PagingPolicy, progress: PromptProgress) -> list[tuple[int, PageRange]]:
        """Return the readable pages of each group; a partial last block only at the end."""
        num_final = progress.num_ready_tokens // paging.block_tokens
        end = paging.num_blocks(len(self.request.token_ids)) if self.is_finished else num_final
        return [(group, run.within(run.first, end)) for group, run in enumerate(progress.page_ranges)]

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


class LeaseManager:
    """All leases of this worker."""

    def __init__(
        self,
        client: EngineClient[EngineSequence],
        engine: Engine,
        store: StorePrefix,
        boot_id: str,
        fingerprint: ModelFingerprint,
    ) -> None:
        self._client = client
        self._engine = engine
        self._store = store
        self._boot_id = boot_id
        self._fingerprint = fingerprint

    @property
    def paging(self) -> PagingPolicy:
        return self._engine.paging

    @contextmanager
    def open(self, request: PrefillRequest) -> Iterator[KvLease]:
        """Hold the blocks that `begin` computes until the scope ends.

        Raises Incompatible, InvalidRequest or PeerLost.
        """
        self._check(request)
        lease = KvLease(request)
        with self._client.open(lease):
            try:
                yield lease
            finally:
                if lease.is_submitted:  # A request rejected earlier held nothing and does not count.
                    metrics.LEASES.labels("stalled" if isinstance(lease.failure, PeerLost) else lease.end).inc()

    async def begin(self, lease: KvLease) -> None:
        """Submit the prompt. Raises Incompatible, InvalidRequest or Overloaded."""
        request = lease.request
        spec = SequenceSpec(
            key=request.key,
            token_ids=request.token_ids,
            sampling=request.sampling,
            mode=SequenceMode.PREFILL,
            cache_salt=request.cache_salt,
            wait_for_kv=True,
            resumed_tokens=request.resumed_tokens,
            priority=request.priority,
            retention=request.retention,
        )
        await self._client.submit(lease, spec)

    async def fill(self, lease: KvLease) -> None:
        """Fill blocks from the store, then let the engine compute the rest."""
        reserved = await lease.until_reserved()
        request = lease.request
        lease.store_tokens = sum((await self._store.fetch(request.token_ids, request.cache_salt, reserved)).values())
        self._engine.complete_kv(request.key, reserved.num_hit_tokens + lease.store_tokens)

    def find(self, key: RequestKey) -> KvLease:
        """Return a live lease. Raises NotFound."""
        lease = self._client.get(key)
        if not isinstance(lease, KvLease):
            raise NotFound("no live lease has this key")
        return lease

    def _check(self, request: PrefillRequest) -> None:
        if request.prefill_boot_id != self._boot_id:
            raise Incompatible("the prefill worker has been restarted since the request was routed")
        if (difference := self._fingerprint.difference(request.fingerprint)) is not None:
            raise Incompatible(f"prefill and decode differ in {difference}")
        if is_superseded(request.key, self._client.keys):
            raise InvalidRequest("a later attempt at the request is running")
