"""The open Prefill call is the lease: which blocks it covers, and how it ends."""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import time
from collections.abc import Callable

import grpc
import pytest
import xxhash

from tests.services.attach import new_key, prompt
from tests.services.prefill.borrower import Borrower, start_lender
from tests.services.workers import BLOCK_TOKENS, CHUNK_TOKENS, fingerprint_of
from tests.weft.tiny_llama import Tiny
from weft.engine.messages import PromptCounts, PromptProgress, Reserved, TokenDelta
from weft.errors import Cancelled, Overloaded
from weft.kv.layer_groups import AttentionSpan, PageRange, PagingPolicy
from weft.kv.transfer import (
    Accepted,
    HostBlocks,
    LeaseClosed,
    PrefillEvent,
    PrefillRequest,
    PromptFinished,
    ReadyBlocks,
)
from weft.request import Grammar, SamplingParams
from weft.worker.engine_client import EngineSequence, GrammarCompiler
from weft_mesh.v1 import prefill_service_pb2 as pb2
from weft_services.prefill.service import KvLease, _ResponseStream


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
                page = await borrower.read([block])
                size = len(page) // tiny.config.num_kv_heads
                heads = [page[first : first + size] for first in range(0, len(page), size)]
                assert sum(xxhash.xxh3_64_intdigest(each, seed) for seed, each in enumerate(heads)) % 2**64 == checksum


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


async def test_silence_ends_the_lease(tiny: Tiny) -> None:
    async with start_lender(tiny, lease_seconds=2.0) as lender:
        borrower = lender.borrower(prompt(22))
        ready, _ = await borrower.until_finished()
        assert await borrower.status() is grpc.StatusCode.NOT_FOUND, "nothing that this worker could be blamed for"
        await lender.worker.until_idle()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await borrower.read(ready[0].blocks)
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND


async def test_renewals_keep_the_lease(tiny: Tiny) -> None:
    lease_seconds = 1.0
    async with start_lender(tiny, lease_seconds=lease_seconds) as lender:
        for attempt in range(5):
            pauses: list[float] = []
            try:
                await _renew(lender.borrower(prompt(22)), pauses)
                break
            except (AssertionError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
                # a machine that let nobody speak for so long is the one excuse
                if attempt == 4 or max(pauses) < lease_seconds / 2:
                    raise


async def _renew(borrower: Borrower, pauses: list[float]) -> None:
    """Renew for one and a half leases, then end well; record how long the caller was silent each time."""
    said_at = time.monotonic()
    await borrower.until_finished()
    for number in range(16):
        await asyncio.sleep(0.1)  # time itself is what is tested
        pauses.append(time.monotonic() - said_at)
        said_at += pauses[-1]
        await (borrower.renew() if number < 15 else borrower.done())
    assert await borrower.next() == LeaseClosed(True)


@pytest.mark.parametrize(("ours", "theirs_ms"), [(600.0, 30), (0.05, 600_000)])
async def test_a_prompt_that_waits_for_its_turn_outlives_the_shorter_lease(
    tiny: Tiny, ours: float, theirs_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_begin, until_reserved = asyncio.Event(), EngineSequence.until_reserved

    async def held(sequence: EngineSequence) -> Reserved:
        await may_begin.wait()
        return await until_reserved(sequence)

    monkeypatch.setattr(EngineSequence, "until_reserved", held)
    async with start_lender(tiny, lease_seconds=ours) as lender, asyncio.timeout(20):
        borrower = lender.borrower(prompt(22), lease_ms=theirs_ms)
        await borrower.start()
        for _ in range(10):
            response = await borrower.call.read()
            assert isinstance(response, pb2.PrefillResponse), await borrower.call.code()
            assert response.HasField("heartbeat")
        may_begin.set()
        assert isinstance(await borrower.next(), Accepted)
        if ours < 1:
            await borrower.renew()
            assert await borrower.status() is grpc.StatusCode.NOT_FOUND, "from now on the lender's lease counts"


async def test_an_answer_to_the_acceptance_is_held_to_prefills_lease_however_soon_it_comes(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    say = _ResponseStream.send

    async def say_and_linger(speaker: _ResponseStream, event: PrefillEvent) -> None:
        await say(speaker, event)
        if isinstance(event, Accepted):
            await asyncio.sleep(0.3)  # decode has heard it and answered, and gRPC has not returned yet

    monkeypatch.setattr(_ResponseStream, "send", say_and_linger)
    async with start_lender(tiny, lease_seconds=0.05) as lender, asyncio.timeout(20):
        borrower = lender.borrower(prompt(22), lease_ms=600_000)
        await borrower.start()
        assert isinstance(await borrower.next(), Accepted)
        await borrower.renew()
        assert await borrower.status() is grpc.StatusCode.NOT_FOUND


async def test_decode_hears_that_prefill_lives_while_a_grammar_is_opened(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_open = asyncio.Event()

    async def slow(desk: GrammarCompiler, grammar: Grammar | None, with_twins: bool = False) -> None:
        await is_open.wait()

    monkeypatch.setattr(GrammarCompiler, "compile", slow)
    async with start_lender(tiny, lease_seconds=0.05) as lender, asyncio.timeout(20):
        borrower = lender.borrower(prompt(22), lease_ms=600_000)
        await borrower.start()
        for _ in range(10):
            response = await borrower.call.read()
            assert isinstance(response, pb2.PrefillResponse), await borrower.call.code()
            assert response.HasField("heartbeat")
        is_open.set()
        assert isinstance(await borrower.next(), Accepted)


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


def _ready(lease: KvLease, num_tokens: int) -> None:
    lease.on_progress(PromptProgress(lease.request.key, (PageRange(0, tuple(range(10, 16))),), num_tokens))


async def test_blocks_are_announced_chunk_by_chunk_and_the_partial_one_after_the_prompts_end(tiny: Tiny) -> None:
    order = PrefillRequest(new_key(), "", fingerprint_of(tiny), prompt(22), SamplingParams(max_tokens=1), held_blocks=1)
    lease = KvLease(order)
    paging = PagingPolicy((AttentionSpan(),), BLOCK_TOKENS, CHUNK_TOKENS)
    backing = (ctypes.c_ubyte * 64)()
    events = lease.prefill_events(HostBlocks(ctypes.addressof(backing), 4, 16), paging, with_checksums=False)
    _ready(lease, CHUNK_TOKENS)
    assert await anext(events) == ReadyBlocks(1, (11,))
    _ready(lease, CHUNK_TOKENS + 3)
    _ready(lease, 2 * CHUNK_TOKENS + 3)
    assert await anext(events) == ReadyBlocks(2, (12, 13))
    _ready(lease, 22)
    assert await anext(events) == ReadyBlocks(4, (14,))
    _ready(lease, 22)
    lease.on_delta(TokenDelta(order.key, (7,), prompt=PromptCounts(4, 5, 6, 8)))
    assert await anext(events) == PromptFinished(7, None, 4, 0, 5, 6, 8)
    assert await anext(events) == ReadyBlocks(5, (15,))
    # over a fast way decode is done before we hear that our last word is out
    lease.dismiss()
    assert lease.end == "returned"
    assert [event async for event in events] == []


async def _ended(tiny: Tiny, end: Callable[[KvLease], None]) -> tuple[str, BaseException | None]:
    """End a lease before it is admitted; return its recorded end and the error of the waiting task."""
    order = PrefillRequest(new_key(), "", fingerprint_of(tiny), prompt(22), SamplingParams(max_tokens=1))
    lease = KvLease(order)
    waiting = asyncio.create_task(lease.until_reserved())
    await asyncio.sleep(0)
    end(lease)
    async with asyncio.timeout(5):
        await asyncio.wait({waiting})
    return lease.end, waiting.exception()


async def test_a_refusal_is_heard_by_who_waits_to_be_admitted(tiny: Tiny) -> None:
    full = Overloaded("full", 1.0)
    assert await _ended(tiny, lambda lease: lease.on_ended(full)) == ("broken", full)


async def test_a_borrower_that_is_done_before_it_has_anything_has_cancelled(tiny: Tiny) -> None:
    end, error = await _ended(tiny, KvLease.dismiss)
    assert end == "cancelled"
    assert isinstance(error, Cancelled)
