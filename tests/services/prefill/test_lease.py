"""The call is the lease: what is lent, for how long, and to whom."""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest
import xxhash

from tests.services.workers import BLOCK_TOKENS, CHUNK_TOKENS, Worker, fingerprint_of, new_key, prompt, start_worker
from tests.weft.tiny_llama import Tiny
from weft.engine.messages import PromptCounts, PromptProgress, TokenDelta
from weft.kv.handoff import Accepted, LeaseClosed, PrefillEvent, PrefillOrder, PromptFinished, ReadyBlocks
from weft.kv.memory import HostBlocks
from weft.request import RequestKey, SamplingParams
from weft.rpc.client import open_channel
from weft.rpc.handoff import event_from_wire, order_to_wire
from weft.rpc.wire import key_to_wire
from weft.worker.store import FetchResult
from weft_mesh.v1 import prefill_service_pb2 as pb2
from weft_mesh.v1 import prefill_service_pb2_grpc
from weft_services.prefill import service
from weft_services.prefill.leases import Lease
from weft_services.prefill.service import install


class Borrower:
    """Decode's side, by hand."""

    def __init__(self, stub: prefill_service_pb2_grpc.PrefillServiceAsyncStub, order: PrefillOrder) -> None:
        self.order = order
        self.stub = stub
        self.call = stub.Prefill()

    async def start(self) -> None:
        await self.call.write(pb2.PrefillRequest(start=order_to_wire(self.order)))

    async def renew(self) -> None:
        await self.call.write(pb2.PrefillRequest(renewal=pb2.LeaseRenewal()))

    async def done(self) -> None:
        await self.call.write(pb2.PrefillRequest(done=pb2.TransferDone()))

    async def next(self) -> PrefillEvent:
        response = await self.call.read()
        assert isinstance(response, pb2.PrefillResponse), await self.call.code()
        return event_from_wire(response)

    async def status(self) -> grpc.StatusCode:
        """How the call ends; what is said before is of no interest."""
        with suppress(grpc.aio.AioRpcError):
            while await self.call.read() is not grpc.aio.EOF:
                pass
        code: grpc.StatusCode = await self.call.code()
        return code

    async def until_finished(self) -> tuple[list[ReadyBlocks], PromptFinished]:
        """From the start to the first token."""
        await self.start()
        assert isinstance(await self.next(), Accepted)
        ready = []
        while isinstance(event := await self.next(), ReadyBlocks):
            ready.append(event)
        assert isinstance(event, PromptFinished)
        return ready, event

    async def read(self, blocks: Sequence[int], key: RequestKey | None = None) -> bytes:
        request = pb2.ReadBlocksRequest(key=key_to_wire(key or self.order.key), blocks=blocks)
        return b"".join([chunk.data async for chunk in self.stub.ReadBlocks(request)])


@dataclasses.dataclass
class Lender:
    """A prefill worker and borrowers for it."""

    worker: Worker
    stub: Any
    tiny: Tiny

    def borrower(self, token_ids: Sequence[int], **changes: Any) -> Borrower:
        order = PrefillOrder(
            key=new_key(),
            prefill_boot_id=self.worker.address.boot_id,
            fingerprint=fingerprint_of(self.tiny),
            token_ids=tuple(token_ids),
            sampling=SamplingParams(max_tokens=4),
        )
        return Borrower(self.stub, dataclasses.replace(order, **changes))


@asynccontextmanager
async def start_lender(tiny: Tiny, store: Any = None) -> AsyncIterator[Lender]:
    async with start_worker(tiny, "prefill-0", install, store=store) as worker:
        channel = open_channel(worker.address.address)
        yield Lender(worker, prefill_service_pb2_grpc.PrefillServiceStub(channel), tiny)
        await channel.close()


async def test_blocks_are_held_until_done_and_are_cache_afterwards(tiny: Tiny) -> None:
    async with start_lender(tiny) as lender:
        token_ids = prompt(22)
        borrower = lender.borrower(token_ids)
        ready, finished = await borrower.until_finished()
        assert [index for each in ready for index in range(each.first_index, each.first_index + len(each.blocks))] == [
            *range(6)
        ]
        assert finished.first_token_id == tiny.greedy(list(token_ids), 1)[0]
        assert finished.cached_tokens == 0
        assert (await lender.worker.until_load(lambda load: load.num_running == 0)).active_blocks == 6
        await borrower.done()
        assert await borrower.next() == LeaseClosed(True)
        await lender.worker.until_idle()
        assert lender.worker.load.cached_blocks == 5


async def test_checksums_are_of_the_bytes_that_are_read(tiny: Tiny) -> None:
    async with start_lender(tiny) as lender:
        borrower = lender.borrower(prompt(22))
        ready, _ = await borrower.until_finished()
        for event in ready:
            for block, checksum in zip(event.blocks, event.checksums, strict=True):
                assert xxhash.xxh3_64_intdigest(await borrower.read([block])) == checksum


async def test_blocks_that_the_borrower_holds_are_not_lent(tiny: Tiny) -> None:
    async with start_lender(tiny) as lender:
        ready, _ = await lender.borrower(prompt(22), held_blocks=3).until_finished()
        assert ready[0].first_index == 3
        assert sum(len(event.blocks) for event in ready) == 3


async def test_what_the_pool_holds_counts_as_cached(tiny: Tiny) -> None:
    async with start_lender(tiny) as lender:
        first = lender.borrower(prompt(32))
        await first.until_finished()
        # the other lease still lives: both hold the blocks
        ready, finished = await lender.borrower((*prompt(32), 5, 6)).until_finished()
        assert finished.cached_tokens == 32
        assert finished.store_tokens == 0
        assert sum(len(event.blocks) for event in ready) == 9


async def test_silence_ends_the_lease(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "LEASE_SECONDS", 0.1)
    async with start_lender(tiny) as lender:
        borrower = lender.borrower(prompt(22))
        ready, _ = await borrower.until_finished()
        assert await borrower.status() is grpc.StatusCode.DEADLINE_EXCEEDED
        await lender.worker.until_idle()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await borrower.read(ready[0].blocks)
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND


async def test_renewals_keep_the_lease(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "LEASE_SECONDS", 1.0)
    async with start_lender(tiny) as lender:
        borrower = lender.borrower(prompt(22))
        await borrower.until_finished()
        for _ in range(15):
            await asyncio.sleep(0.1)  # time itself is what is tested: half again as long as the lease
            await borrower.renew()
        await borrower.done()
        assert await borrower.next() == LeaseClosed(True)


async def test_a_broken_stream_ends_the_lease(tiny: Tiny) -> None:
    async with start_lender(tiny) as lender:
        borrower = lender.borrower(prompt(22))
        await borrower.until_finished()
        borrower.call.cancel()
        await lender.worker.until_idle()


async def test_a_borrower_that_loses_interest_midway_stops_the_computing(tiny: Tiny) -> None:
    async with start_lender(tiny) as lender:
        borrower = lender.borrower(prompt(190))
        await borrower.start()
        assert isinstance(await borrower.next(), Accepted)
        borrower.call.cancel()
        await lender.worker.until_idle()
        assert lender.worker.load.queued_prefill_tokens == 0


async def test_only_announced_blocks_of_a_living_lease_can_be_read(tiny: Tiny) -> None:
    async with start_lender(tiny) as lender:
        one, two = lender.borrower(prompt(22)), lender.borrower(prompt(22, seed=2), held_blocks=2)
        (ready_one, _), (ready_two, _) = await one.until_finished(), await two.until_finished()
        own = [block for event in ready_two for block in event.blocks]
        assert len(await two.read(own)) == len(own) * lender.worker.place.memory.block_bytes
        for blocks, key in [
            (ready_one[0].blocks, None),  # another lease's
            ([2**31], None),  # nobody's
            (own, new_key()),  # under no lease
            (own, dataclasses.replace(two.order.key, generation=1)),  # under another attempt's
        ]:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await two.read(blocks, key)
            assert raised.value.code() is grpc.StatusCode.NOT_FOUND


async def test_orders_that_cannot_be_taken_are_refused_by_name(tiny: Tiny) -> None:
    async with start_lender(tiny) as lender:
        mine = fingerprint_of(tiny)
        refusals: list[tuple[dict[str, Any], grpc.StatusCode | None, str]] = [
            ({"prefill_boot_id": "old"}, grpc.StatusCode.FAILED_PRECONDITION, "restarted"),
            ({"fingerprint": dataclasses.replace(mine, kv_dtype="bfloat16")}, None, "kv_dtype: float32 here, bfloat16"),
            ({"fingerprint": dataclasses.replace(mine, block_tokens=64)}, None, "block_tokens"),
            ({"fingerprint": dataclasses.replace(mine, layout="other")}, None, "layout"),
            ({"token_ids": ()}, grpc.StatusCode.INVALID_ARGUMENT, "empty"),
            ({"token_ids": (131,)}, grpc.StatusCode.INVALID_ARGUMENT, "token ids"),
        ]
        for changes, code, details in refusals:
            borrower = lender.borrower(**({"token_ids": prompt(9)} | changes))
            await borrower.start()
            assert await borrower.status() is (code or grpc.StatusCode.FAILED_PRECONDITION)
            assert details in await borrower.call.details()
        await lender.worker.until_idle()


async def test_a_second_order_with_a_living_key_is_refused(tiny: Tiny) -> None:
    async with start_lender(tiny) as lender:
        borrower = lender.borrower(prompt(9))
        await borrower.until_finished()
        second = lender.borrower(prompt(9), key=borrower.order.key)
        await second.start()
        assert await second.status() is grpc.StatusCode.INVALID_ARGUMENT
        await borrower.done()
        assert await borrower.next() == LeaseClosed(True)


async def test_the_first_message_must_be_an_order(tiny: Tiny) -> None:
    async with start_lender(tiny) as lender:
        borrower = lender.borrower(prompt(9))
        await borrower.renew()
        assert await borrower.status() is grpc.StatusCode.INVALID_ARGUMENT


async def test_done_before_the_end_means_that_nobody_wants_it(tiny: Tiny) -> None:
    async with start_lender(tiny) as lender:
        borrower = lender.borrower(prompt(190))
        await borrower.start()
        assert isinstance(await borrower.next(), Accepted)
        await borrower.done()
        assert await borrower.status() is grpc.StatusCode.CANCELLED
        await lender.worker.until_idle()


class FakeStore:
    """Remembers what it was asked for, and fills blocks with another worker's bytes."""

    is_connected = True

    def __init__(self) -> None:
        self.keys: list[bytes] = []
        self.source: dict[bytes, bytes] = {}
        self.target: HostBlocks | None = None
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.was_asked = asyncio.Event()

    async def fetch(self, keys: Sequence[bytes], blocks: Sequence[int], timeout_seconds: float) -> FetchResult:
        self.keys += keys
        self.was_asked.set()
        await self.may_answer.wait()
        num_blocks = 0
        for key, block in zip(keys, blocks, strict=True):
            if key not in self.source:
                break
            assert self.target is not None
            self.target.write(block, 0, self.source[key])
            num_blocks += 1
        return FetchResult(num_blocks)


async def test_what_the_store_has_is_not_computed(tiny: Tiny) -> None:
    store = FakeStore()
    token_ids = prompt(30)
    async with start_lender(tiny, store) as lender:
        borrower = lender.borrower(token_ids)
        ready, first = await borrower.until_finished()
        blocks = [block for event in ready for block in event.blocks]
        assert len(store.keys) == 7  # all full blocks
        store.source = dict(zip(store.keys[:5], [await borrower.read([block]) for block in blocks], strict=False))
    async with start_lender(tiny, store) as lender:
        store.target = lender.worker.place.memory
        _, second = await lender.borrower(token_ids).until_finished()
        assert second.first_token_id == first.first_token_id
        assert (second.cached_tokens, second.store_tokens) == (20, 20)
        _, third = await lender.borrower(token_ids).until_finished()
        assert (third.cached_tokens, third.store_tokens) == (28, 0)


async def test_a_borrower_that_leaves_during_the_store_fetch(tiny: Tiny) -> None:
    store = FakeStore()
    async with start_lender(tiny, store) as lender:
        store.may_answer.clear()
        borrower = lender.borrower(prompt(30))
        await borrower.start()
        await store.was_asked.wait()
        borrower.call.cancel()
        await lender.worker.until_idle()


def _ready(lease: Lease, num_tokens: int) -> None:
    lease.on_progress(PromptProgress(lease.order.key, tuple(range(10, 16)), num_tokens))


async def test_blocks_are_announced_chunk_by_chunk_and_the_partial_one_last(tiny: Tiny) -> None:
    order = PrefillOrder(new_key(), "", fingerprint_of(tiny), prompt(22), SamplingParams(max_tokens=1), held_blocks=1)
    lease = Lease(order)
    backing = (ctypes.c_ubyte * 64)()
    events = lease.events(HostBlocks(ctypes.addressof(backing), 4, 16), BLOCK_TOKENS, with_checksums=False)
    _ready(lease, CHUNK_TOKENS)
    assert await anext(events) == ReadyBlocks(1, (11,))
    _ready(lease, CHUNK_TOKENS + 3)
    _ready(lease, 2 * CHUNK_TOKENS + 3)
    assert await anext(events) == ReadyBlocks(2, (12, 13))
    _ready(lease, 22)
    assert await anext(events) == ReadyBlocks(4, (14,))
    lease.on_first_token(TokenDelta(order.key, (7,), prompt=PromptCounts(4, 5, 6)))
    assert await anext(events) == ReadyBlocks(5, (15,))
    assert await anext(events) == PromptFinished(7, None, 4, 0, 5, 6)
    assert [event async for event in events] == []
