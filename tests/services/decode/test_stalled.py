"""An engine that hangs in a living process: peers notice, and the text stays the same."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.services.attach import GREEDY, prompt
from tests.services.decode.test_failures import LONG, Liar, expect_local, failures
from tests.services.workers import Worker, start_pair
from tests.weft.tiny_llama import Tiny
from weft.engine.engine import StepWatchdog
from weft.errors import Overloaded, PeerLost
from weft.kv.transfer import Accepted, Heartbeat, LeaseClosed, PromptFinished, ReadyBlocks
from weft.request import RequestKey, WorkerAddress
from weft.rpc.server import RpcServer
from weft.rpc.wire import event_to_wire
from weft_mesh.v1 import prefill_service_pb2_grpc
from weft_services.decode import remote_prefill
from weft_services.decode.remote_prefill import LocalPrefillBudget
from weft_services.prefill import service as prefill_service


@asynccontextmanager
async def standing(worker: Worker) -> AsyncIterator[None]:
    """Hang the engine's thread in its next step until the scope ends."""
    go_on = threading.Event()

    def hang() -> None:
        go_on.wait(60)

    worker.engine._commands.post(hang)
    try:
        yield
    finally:
        go_on.set()


class Impatient(StepWatchdog):
    """Counts an engine as hung after half a second."""

    @property
    def hang_timeout(self) -> float:
        return 0.5


@asynccontextmanager
async def found_standing(worker: Worker) -> AsyncIterator[None]:
    """Hang this engine and shorten only its watchdog: on a busy machine a step of the other may take as long."""
    watchdog: Any = worker.engine.watchdog
    watchdog.__class__ = Impatient
    try:
        async with standing(worker):
            yield
    finally:
        watchdog.__class__ = StepWatchdog


async def test_a_prefill_engine_that_stands_still(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    for speaker in (prefill_service, remote_prefill):  # both sides speak often, and a pause of one is not yet silence
        monkeypatch.setattr(speaker, "HEARTBEATS_PER_LEASE", 50)
    async with start_pair(tiny, lease_seconds=10.0) as pair:
        async with found_standing(pair.prefill):
            await expect_local(pair, pair.prefill.address, "peer_lost")
        await pair.until_idle()
        # it goes on, and is used again
        other = prompt(30, seed=5)
        answer = await pair.gateway.generate(other, pair.prefill.address)
        assert answer.tokens == pair.expected(other)
        assert answer.usage is not None
        assert answer.usage.prefill_worker_id == "prefill-0"


async def test_a_decode_engine_that_stands_still_gives_its_sequences_back(tiny: Tiny) -> None:
    async with start_pair(tiny) as pair:
        async with found_standing(pair.decode):
            answer = await pair.gateway.generate(LONG)
            assert answer.failure is not None
            assert (answer.failure.code, answer.failure.worker_id) == (PeerLost.code, "decode-0")
        await pair.until_idle()
        assert (await pair.gateway.generate(LONG)).tokens == pair.expected(LONG)


class Silent(Liar):
    """Sends its events, then nothing."""

    async def Prefill(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        async for response in super().Prefill(request_iterator, context):
            yield response
        await asyncio.Event().wait()


@pytest.mark.parametrize("plot", [[Accepted], [Accepted, ReadyBlocks], [Accepted, ReadyBlocks, PromptFinished]])
async def test_silence_longer_than_the_lease_ends_the_call(tiny: Tiny, plot: list[type]) -> None:
    async with start_pair(tiny) as pair:
        said = {
            Accepted: Accepted("", pair.prefill.place.transports[-1].endpoint(), 300),
            ReadyBlocks: ReadyBlocks(0, tuple(range(-(-len(LONG) // 4)))),
            PromptFinished: PromptFinished(pair.expected(LONG)[0], None, 0, 0, 0, 0),
        }
        rpc = RpcServer([])
        prefill_service_pb2_grpc.add_PrefillServiceServicer_to_server(Silent([said[kind] for kind in plot]), rpc.server)
        address = WorkerAddress("liar", "boot", await rpc.start("127.0.0.1", 0))
        await expect_local(pair, address, "timeout")
        await rpc.stop(0)


class Echo(prefill_service_pb2_grpc.PrefillServiceServicer):
    """Sends every event of a real worker twice, with heartbeats between."""

    def __init__(self, stub: Any) -> None:
        self.stub = stub

    async def Prefill(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        call = self.stub.Prefill(request_iterator)
        async for response in call:
            for _ in range(1 if response.WhichOneof("event") == "closing" else 2):
                yield response
                yield event_to_wire(Heartbeat())

    async def Embed(self, request: Any, context: Any) -> Any:
        raise NotImplementedError("nobody asks")

    async def ReadBlocks(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async for response in self.stub.ReadBlocks(request):
            yield response


async def test_what_prefill_says_twice_changes_nothing(tiny: Tiny) -> None:
    async with start_pair(tiny) as pair, pair.decode.place.channels.channel(pair.prefill.address.address) as channel:
        rpc = RpcServer([])
        stub = prefill_service_pb2_grpc.PrefillServiceStub(channel)
        prefill_service_pb2_grpc.add_PrefillServiceServicer_to_server(Echo(stub), rpc.server)
        echo = WorkerAddress("echo", pair.prefill.address.boot_id, await rpc.start("127.0.0.1", 0))
        answer = await pair.gateway.generate(LONG, echo)
        assert answer.tokens == pair.expected(LONG)
        assert answer.usage is not None
        assert answer.usage.prefill_worker_id == "echo"
        assert answer.usage.transferred_bytes == -(-len(LONG) // 4) * pair.decode.place.memory.block_bytes
        await pair.until_idle()
        await rpc.stop(0)


async def test_an_attempt_that_was_overtaken_changes_nothing(tiny: Tiny) -> None:
    async with start_pair(tiny) as pair:
        async with standing(pair.decode):
            late, now = RequestKey("again", 1), RequestKey("again", 2)
            _, answer = await pair.gateway.start(prompt(9), key=now)
            await pair.gateway.start(prompt(30, seed=3), key=late)
        async with asyncio.timeout(20):
            await answer.has_ended.wait()
        assert answer.tokens == pair.expected(prompt(9))
        await pair.until_idle()
        assert pair.decode.load.generated_tokens == GREEDY.max_tokens


def test_only_so_many_tokens_of_failed_hand_offs_are_computed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_prefill, "MAX_LOCAL_PREFILL_TOKENS", 100)
    one, two, three = (RequestKey(name) for name in "abc")
    fallbacks = LocalPrefillBudget()
    fallbacks.begin(one, 1000, "prefill-0")  # the first, whatever its length
    with pytest.raises(PeerLost) as raised:
        fallbacks.begin(two, 1, "prefill-0")
    assert raised.value.worker_id == "prefill-0"
    fallbacks.end(one)
    fallbacks.end(one)
    fallbacks.begin(two, 60, "prefill-0")
    fallbacks.begin(three, 40, "prefill-0")


async def test_beyond_them_the_gateway_hears_which_worker_is_lost(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_prefill, "MAX_LOCAL_PREFILL_TOKENS", 50)
    async with start_pair(tiny) as pair:
        pair.prefill.client.close()
        before = failures("peer_lost")
        async with standing(pair.decode):
            started = [await pair.gateway.start(prompt(30, seed=seed), pair.prefill.address) for seed in (1, 2, 3)]
        for _, answer in started:
            async with asyncio.timeout(20):
                await answer.has_ended.wait()
        assert failures("peer_lost") == before + 3
        failed = [answer.failure for _, answer in started if answer.failure is not None]
        assert {(failure.code, failure.worker_id) for failure in failed} == {(PeerLost.code, "prefill-0")}
        assert 1 <= len(failed) <= 2
        await pair.until_idle()


async def test_beyond_them_nobody_is_blamed_for_a_lender_that_was_only_full(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_prefill, "MAX_LOCAL_PREFILL_TOKENS", 50)
    async with start_pair(tiny) as pair:
        monkeypatch.setattr(pair.prefill.engine._commands, "_max_waiting", 0)
        async with standing(pair.decode):
            started = [await pair.gateway.start(prompt(30, seed=seed), pair.prefill.address) for seed in (1, 2, 3)]
        for _, answer in started:
            async with asyncio.timeout(20):
                await answer.has_ended.wait()
        failed = [answer.failure for _, answer in started if answer.failure is not None]
        assert {(failure.code, failure.worker_id) for failure in failed} == {(PeerLost.code, "")}
        await pair.until_idle()


async def test_a_decode_worker_that_is_full_says_which_one_it_is(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    async with start_pair(tiny) as pair:
        monkeypatch.setattr(pair.decode.engine._commands, "_max_waiting", 0)
        answer = await pair.gateway.generate(LONG)
        assert answer.failure is not None
        assert (answer.failure.code, answer.failure.worker_id) == (Overloaded.code, "decode-0")


async def test_a_lease_that_was_lost_midway_is_not_taken_for_one_that_held(tiny: Tiny) -> None:
    async with start_pair(tiny) as pair:
        accepted = Accepted("", pair.prefill.place.transports[-1].endpoint(), 5_000)
        all_blocks = ReadyBlocks(0, tuple(range(-(-len(LONG) // 4))))
        plot = [accepted, all_blocks, PromptFinished(pair.expected(LONG)[0], None, 0, 0, 0, 0), LeaseClosed(False)]
        rpc = RpcServer([])
        prefill_service_pb2_grpc.add_PrefillServiceServicer_to_server(Silent(plot), rpc.server)
        await expect_local(pair, WorkerAddress("liar", "boot", await rpc.start("127.0.0.1", 0)), "lease_lost")
        await rpc.stop(0)
