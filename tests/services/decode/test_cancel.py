"""Cancelled sequences release everything on both workers, at every stage."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.services.attach import Gateway, new_key, prompt
from tests.services.workers import Meddler, Pair, start_pair
from tests.weft.tiny_llama import Tiny
from weft.asyncio_compat import background_tasks
from weft.errors import DeadlineExceeded, Incompatible, InvalidRequest, Overloaded, PeerLost
from weft.request import SamplingParams
from weft.rpc.client import as_weft_error
from weft.worker import kv_pull
from weft_mesh.v1 import decode_service_pb2
from weft_services.decode import service
from weft_services.decode.remote_prefill import KvReceiver
from weft_services.decode.sequences import Outbox, SequenceManager

ENDLESS = SamplingParams(max_tokens=150, ignore_eos=True)


@pytest.fixture(autouse=True)
def _short_quarantine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_pull, "SAFETY_SECONDS", 0.01)


class Gate(Meddler):
    """Holds every pull until it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.is_reached = asyncio.Event()
        self.opening = asyncio.Event()

    async def before(self) -> None:
        self.is_reached.set()
        await self.opening.wait()


async def test_cancelled_while_it_waits_for_blocks(tiny: Tiny) -> None:
    gate = Gate()
    async with start_pair(tiny, meddler=gate, num_blocks=10) as pair:
        first, _ = await pair.gateway.start(prompt(30), pair.prefill.address)
        await gate.is_reached.wait()
        second, answer = await pair.gateway.start(prompt(30, seed=2), pair.prefill.address)
        await pair.decode.until_load(lambda load: load.num_waiting == 2)
        await pair.gateway.cancel(second)
        await pair.decode.until_load(lambda load: load.num_waiting == 1)
        await pair.gateway.cancel(first)
        gate.opening.set()
        await pair.until_idle()
        assert not answer.has_begun.is_set()


async def test_cancelled_during_a_pull_its_blocks_are_nobodys_until_the_pull_has_ended(tiny: Tiny) -> None:
    gate = Gate()
    async with start_pair(tiny, "mooncake", gate) as pair:
        key, answer = await pair.gateway.start(prompt(40), pair.prefill.address)
        await gate.is_reached.wait()
        await pair.gateway.cancel(key)
        load = await pair.decode.until_load(lambda load: load.active_blocks == 0)
        assert load.quarantined_blocks > 0
        # prefill need not wait: nobody writes there
        await pair.prefill.until_idle()
        others = [await pair.gateway.generate(prompt(40, seed=seed)) for seed in (3, 4, 5)]
        gate.opening.set()
        await pair.decode.until_idle()
        for seed, other in zip((3, 4, 5), others, strict=True):
            assert other.tokens == pair.expected(prompt(40, seed=seed))
            # what the late pull wrote is in no block that a cache answers with
            again = await pair.gateway.generate(prompt(40, seed=seed))
            assert again.tokens == other.tokens
        # the first token waits for no pull; whoever has left hears nothing more
        assert len(answer.tokens) <= 1
        assert not answer.has_ended.is_set()


async def test_cancelled_while_a_hand_off_is_being_given_up(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    is_giving_up, may_end = asyncio.Event(), asyncio.Event()

    async def slow_to_end() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            is_giving_up.set()
            await may_end.wait()

    async def receive(*_: object) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(slow_to_end())
            await asyncio.sleep(0)
            raise PeerLost("the lender is gone")

    monkeypatch.setattr(KvReceiver, "receive", receive)
    async with start_pair(tiny) as pair:
        key, answer = await pair.gateway.start(prompt(30), pair.prefill.address, sampling=ENDLESS)
        await is_giving_up.wait()
        await pair.gateway.cancel(key)
        # on the same stream: when this is answered, the other word has been heard
        assert (await pair.gateway.generate(prompt(6))).tokens == pair.expected(prompt(6))
        may_end.set()
        await pair.decode.until_idle()
        await pair.gateway.generate(prompt(7))
        assert answer.tokens == []


async def test_cancelled_while_it_generates(tiny: Tiny) -> None:
    async with start_pair(tiny) as pair:
        key, answer = await pair.gateway.start(prompt(20), pair.prefill.address, sampling=ENDLESS)
        await answer.has_begun.wait()
        await pair.gateway.cancel(key)
        await pair.until_idle()
        assert not answer.has_ended.is_set()


async def test_cancelling_what_has_ended_or_never_was_changes_nothing(tiny: Tiny) -> None:
    async with start_pair(tiny) as pair:
        key, answer = await pair.gateway.start(prompt(5))
        await answer.has_ended.wait()
        await pair.gateway.cancel(key)
        await pair.gateway.cancel(new_key())
        assert (await pair.gateway.generate(prompt(6))).tokens == pair.expected(prompt(6))


async def test_the_end_of_the_stream_cancels_all_its_sequences_and_no_others(tiny: Tiny) -> None:
    gate = Gate()
    async with start_pair(tiny, meddler=gate) as pair, background_tasks() as tasks:
        leaver = Gateway(pair.decode.address, tasks)
        await leaver.start(prompt(30), pair.prefill.address)
        _, generating = await leaver.start(prompt(9), sampling=ENDLESS)
        _, staying = await pair.gateway.start(prompt(7), sampling=ENDLESS)
        await generating.has_begun.wait()
        await gate.is_reached.wait()
        await leaver.leave()
        gate.opening.set()
        await staying.has_ended.wait()
        assert staying.tokens == pair.expected(prompt(7), ENDLESS.max_tokens)
        await pair.until_idle()


async def test_a_gateway_that_closes_its_side_is_done(tiny: Tiny) -> None:
    async with start_pair(tiny) as pair, background_tasks() as tasks:
        leaver = Gateway(pair.decode.address, tasks)
        _, answer = await leaver.start(prompt(9), sampling=ENDLESS)
        await answer.has_begun.wait()
        await leaver.done()
        await pair.until_idle()


async def test_time_that_is_over_is_a_failure_and_gives_back(tiny: Tiny) -> None:
    gate = Gate()
    async with start_pair(tiny, meddler=gate) as pair:
        answer = await pair.gateway.generate(prompt(30), pair.prefill.address, remaining_ms=300)
        assert answer.failure is not None
        assert answer.failure.code == DeadlineExceeded.code
        gate.opening.set()
        await pair.until_idle()


async def expect_failure(pair: Pair, code: int, worker_id: str, **options: object) -> str:
    """Run a sequence that fails at once; return its message."""
    answer = await pair.gateway.generate(options.pop("token_ids", prompt(9)), **options)  # type: ignore[arg-type]
    assert answer.failure is not None
    assert not answer.tokens
    assert (answer.failure.code, answer.failure.worker_id) == (code, worker_id)
    await pair.until_idle()
    return answer.failure.message


async def test_another_boot_of_this_worker_was_meant(tiny: Tiny) -> None:
    async with start_pair(tiny) as pair:
        await expect_failure(pair, Incompatible.code, "decode-0", decode_boot_id="an earlier one")


async def test_a_request_that_the_engine_refuses_fails_with_its_reason(tiny: Tiny) -> None:
    async with start_pair(tiny) as pair:
        assert "201 tokens" in await expect_failure(pair, InvalidRequest.code, "", token_ids=prompt(201))
        # the same through prefill
        await expect_failure(pair, InvalidRequest.code, "", token_ids=prompt(201), prefill=pair.prefill.address)


async def test_a_worker_that_is_leaving_takes_nothing_new(tiny: Tiny) -> None:
    async with start_pair(tiny) as pair:
        _, living = await pair.gateway.start(prompt(20), sampling=ENDLESS)
        await living.has_begun.wait()
        pair.decode.client.close()
        answer = await pair.gateway.generate(prompt(9))
        assert answer.failure is not None
        assert (answer.failure.code, answer.failure.worker_id) == (PeerLost.code, "decode-0")
        await pair.decode.client.until_idle()
        await living.has_ended.wait()
        assert living.tokens == pair.expected(prompt(20), ENDLESS.max_tokens)


async def test_an_outbox_that_is_not_emptied_says_so_and_stays_bounded() -> None:
    outbox = Outbox[int](max_frames=2)
    for number in range(10):
        outbox.put([number])
    with pytest.raises(Overloaded):
        await outbox.until_overflow()
    assert [await outbox.get(), await outbox.get()] == [[0], [1]]


class NeverReads:
    """A peer that accepts no message."""

    async def write(self, message: object) -> None:
        await asyncio.Event().wait()

    async def requests(self, *starts: decode_service_pb2.StartSequence) -> AsyncIterator[Any]:
        for start in starts:
            yield decode_service_pb2.AttachRequest(start=start)
        await asyncio.Event().wait()


async def test_a_gateway_that_reads_too_slowly_loses_its_sequences(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    servicers: list[service.DecodeServicer] = []

    class KeptServicer(service.DecodeServicer):
        def __init__(self, manager: SequenceManager) -> None:
            super().__init__(manager)
            servicers.append(self)

    monkeypatch.setattr(service, "MAX_FRAMES", 8)
    monkeypatch.setattr(service, "DecodeServicer", KeptServicer)
    async with start_pair(tiny) as pair:
        peer = NeverReads()
        start = pair.gateway.start_message(new_key(), prompt(9), None, ENDLESS)
        with pytest.raises(ExceptionGroup) as raised:
            await servicers[0].Attach(peer.requests(start), peer)
        assert isinstance(as_weft_error(raised.value), Overloaded)
        await pair.until_idle()


async def test_many_at_once_some_of_them_cancelled_lose_no_block(tiny: Tiny) -> None:
    chance = random.Random(4)
    async with start_pair(tiny, "mooncake", num_blocks=96) as pair:
        lengths = [chance.randrange(1, 90) for _ in range(24)]
        started = [await pair.gateway.start(prompt(n, seed=n), pair.prefill.address) for n in lengths]
        leaving = chance.sample(range(24), 9)
        for index in leaving:
            key, answer = started[index]
            if index % 2:
                async with asyncio.timeout(20):
                    await answer.has_begun.wait()
            await pair.gateway.cancel(key)
        for index, (_, answer) in enumerate(started):
            if index not in leaving:
                async with asyncio.timeout(20):
                    await answer.has_ended.wait()
                assert answer.tokens == pair.expected(prompt(lengths[index], seed=lengths[index]))
        await pair.until_idle()
