"""Every way a KV transfer can fail: the text stays the same, no block is lost, the reason is counted."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.services.attach import GREEDY, prompt
from tests.services.workers import CHUNK_TOKENS, Meddler, Pair, Worker, fingerprint_of, start_pair
from tests.weft.tiny_llama import Tiny
from weft import metrics
from weft.kv.transfer import (
    Accepted,
    CopyRange,
    LeaseClosed,
    PromptFinished,
    ReadyBlocks,
    TransferFailed,
)
from weft.request import WorkerAddress
from weft.rpc.server import RpcServer
from weft.rpc.wire import event_to_wire, prefill_request_from_wire
from weft.worker import kv_pull
from weft.worker.config import LEASE_SECONDS
from weft.worker.engine_client import StatsRecorder
from weft_mesh.v1 import prefill_service_pb2, prefill_service_pb2_grpc
from weft_services.decode.remote_prefill import RemotePrefill

LONG = prompt(4 * CHUNK_TOKENS + 3)


@pytest.fixture(autouse=True)
def _short_quarantine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_pull, "SAFETY_SECONDS", 0.01)


def failures(reason: str) -> float:
    return float(metrics.TRANSFER_FAILURES.labels(reason)._value.get())


async def test_every_reason_is_counted_from_the_start(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    told: set[str] = set()
    monkeypatch.setattr(StatsRecorder, "declare_failures", lambda _, reasons: told.update(reasons))
    async with start_pair(tiny):
        assert {"peer_lost", "incompatible", "checksum", "circle", "failed"} <= told


# of the tiny model's blocks, which are four tokens long
BLOCK_BYTES = 6144
# why others should leave the prefill worker alone for a while
BLAMED = {"peer_lost", "timeout"}


async def expect_local(pair: Pair, prefill: WorkerAddress, *reasons: str) -> None:
    """Check that decode computes the prompt, counts one of these reasons, and names a lost prefill worker."""
    before = {reason: failures(reason) for reason in reasons}
    answer = await pair.gateway.generate(LONG, prefill)
    assert answer.failure is None
    assert answer.tokens == pair.expected(LONG)
    assert answer.usage is not None
    assert answer.usage.prefill_worker_id == "decode-0"
    (happened,) = (reason for reason in reasons if failures(reason) > before[reason])
    assert failures(happened) == before[happened] + 1
    assert answer.usage.failed_worker_id == (prefill.worker_id if happened in BLAMED else "")
    await pair.decode.until_idle()


class OnPull(Meddler):
    """Acts before the first pull, while prefill computes the next chunks."""

    async def before(self) -> None:
        if self.num_pulls == 1:
            await self.strike()

    async def strike(self) -> None:
        raise NotImplementedError


async def test_a_prefill_worker_that_dies_midway(tiny: Tiny) -> None:
    class Kill(OnPull):
        victim: Worker

        async def strike(self) -> None:
            await self.victim.rpc.stop(0)

    meddler = Kill()
    async with start_pair(tiny, meddler=meddler) as pair:
        meddler.victim = pair.prefill
        # the stream breaks, and so do its last reads: there is no lease any more
        await expect_local(pair, pair.prefill.address, "transfer", "peer_lost")
        await pair.prefill.until_idle()
        await expect_local_again(pair)


async def expect_local_again(pair: Pair) -> None:
    """Check the fallback when the address no longer answers."""
    before = failures("peer_lost")
    other = prompt(30, seed=5)
    assert (await pair.gateway.generate(other, pair.prefill.address)).tokens == pair.expected(other)
    assert failures("peer_lost") == before + 1


async def test_a_pull_that_fails(tiny: Tiny) -> None:
    class Fail(OnPull):
        async def strike(self) -> None:
            raise TransferFailed("torn")

    async with start_pair(tiny, meddler=Fail()) as pair:
        await expect_local(pair, pair.prefill.address, "transfer")
        await pair.until_idle()


async def test_blocks_that_arrive_damaged(tiny: Tiny) -> None:
    class Damage(Meddler):
        victim: Worker

        async def after(self, runs: Sequence[CopyRange]) -> None:
            memory = self.victim.place.memory
            block = (runs[-1].local_address - memory.address) // memory.block_bytes
            memory.write(block, 5, bytes([memory.read(block)[5] ^ 1]))

    meddler = Damage()
    async with start_pair(tiny, "mooncake", meddler) as pair:
        meddler.victim = pair.decode
        await expect_local(pair, pair.prefill.address, "checksum")
        await pair.until_idle()


async def test_a_pull_that_nobody_has_patience_for(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft_services.decode.remote_prefill.PULL_SECONDS", 0.05)
    monkeypatch.setattr(kv_pull, "EXTRA_WAIT_SECONDS", 0.0)
    gate = asyncio.Event()

    class Stall(OnPull):
        async def strike(self) -> None:
            await gate.wait()

    async with start_pair(tiny, meddler=Stall()) as pair:
        before = failures("timeout")
        answer = await pair.gateway.generate(LONG, pair.prefill.address)
        assert answer.tokens == pair.expected(LONG)
        assert failures("timeout") == before + 1
        # the pull is still under way: its blocks must not be anybody's
        load = await pair.decode.until_load(lambda load: load.active_blocks == 0)
        assert load.quarantined_blocks > 0
        gate.set()
        await pair.until_idle()


async def test_a_prefill_worker_that_was_restarted(tiny: Tiny) -> None:
    async with start_pair(tiny) as pair:
        stale = dataclasses.replace(pair.prefill.address, boot_id="an earlier one")
        await expect_local(pair, stale, "incompatible")
        await pair.prefill.until_idle()


async def test_a_prefill_worker_of_another_model(tiny: Tiny) -> None:
    fingerprint = dataclasses.replace(fingerprint_of(tiny), weights_hash="beef")
    async with start_pair(tiny, fingerprint=fingerprint) as pair:
        await expect_local(pair, pair.prefill.address, "incompatible")
        await pair.prefill.until_idle()


async def test_a_prefill_worker_of_the_same_weights_that_rotates_otherwise(tiny: Tiny) -> None:
    config = dataclasses.replace(tiny.config, rope=dataclasses.replace(tiny.config.rope, theta=5e5))
    fingerprint = fingerprint_of(dataclasses.replace(tiny, config=config))
    async with start_pair(tiny, fingerprint=fingerprint) as pair:
        await expect_local(pair, pair.prefill.address, "incompatible")
        await pair.prefill.until_idle()


async def test_a_prefill_worker_that_is_leaving(tiny: Tiny) -> None:
    async with start_pair(tiny) as pair:
        pair.prefill.client.close()
        await expect_local(pair, pair.prefill.address, "peer_lost")


async def test_a_call_that_breaks_off_on_our_side(tiny: Tiny) -> None:
    # a lease that the wire has no room for: the library ends a call whose messages cannot be made, and tells nobody
    async with start_pair(tiny, lease_seconds=5_000_000) as pair:
        await expect_local(pair, pair.prefill.address, "failed")


class Liar(prefill_service_pb2_grpc.PrefillServiceServicer):
    """Announces blocks that it never computed; `plot` lists the events that it sends."""

    def __init__(self, plot: Sequence[Any]) -> None:
        self.plot = plot
        self.seconds_left: float | None = None
        self.lease_ms = 0

    async def Prefill(self, request_iterator: Any, context: Any) -> AsyncIterator[prefill_service_pb2.PrefillResponse]:
        order = prefill_request_from_wire((await anext(aiter(request_iterator))).start)
        self.seconds_left, self.lease_ms = context.time_remaining(), order.lease_ms
        for event in self.plot:
            yield event_to_wire(
                dataclasses.replace(event, boot_id=order.prefill_boot_id) if isinstance(event, Accepted) else event
            )

    async def Embed(self, request: Any, context: Any) -> Any:
        raise NotImplementedError("nobody asks")

    async def ReadBlocks(self, request: Any, context: Any) -> AsyncIterator[prefill_service_pb2.ReadBlocksResponse]:
        for block in request.blocks:
            yield prefill_service_pb2.ReadBlocksResponse(block=block, data=bytes(BLOCK_BYTES))


def plots(pair: Pair) -> dict[str, tuple[str, list[Any]]]:
    """Return the events of each plot, by the reason that must be counted."""
    accepted = Accepted("", pair.prefill.place.transports[-1].endpoint(), 60_000)
    finished = PromptFinished(pair.expected(LONG)[0], None, 0, 0, 0, 0)
    num_blocks = -(-len(LONG) // 4)
    all_blocks = ReadyBlocks(0, tuple(range(num_blocks)))
    return {
        "takes blocks back": ("lease_lost", [accepted, all_blocks, finished, LeaseClosed(False)]),
        "closes before the end": ("lease_lost", [accepted, all_blocks, LeaseClosed(True)]),
        "lends too little": ("protocol", [accepted, ReadyBlocks(0, (1, 2)), finished, LeaseClosed(True)]),
        "lends too much": ("protocol", [accepted, ReadyBlocks(0, tuple(range(num_blocks + 1)))]),
        "sums one block of many": ("protocol", [accepted, dataclasses.replace(all_blocks, checksums=(1,))]),
        "leaves a gap": ("protocol", [accepted, ReadyBlocks(1, (1,))]),
        "lends before it accepts": ("protocol", [all_blocks]),
        "falls silent": ("peer_lost", [accepted, all_blocks, finished]),
    }


@asynccontextmanager
async def start_liar(liar: Liar) -> AsyncIterator[WorkerAddress]:
    rpc = RpcServer([])
    prefill_service_pb2_grpc.add_PrefillServiceServicer_to_server(liar, rpc.server)
    try:
        yield WorkerAddress("liar", "boot", await rpc.start("127.0.0.1", 0))
    finally:
        await rpc.stop(0)


async def test_a_prefill_worker_that_breaks_its_word(tiny: Tiny) -> None:
    async with start_pair(tiny) as pair:
        assert pair.decode.place.memory.block_bytes == BLOCK_BYTES
        for name, (reason, plot) in plots(pair).items():
            async with start_liar(liar := Liar(plot)) as address:
                before = failures(reason)
                # a salt of its own: decode must not find the prompt in its cache
                answer = await pair.gateway.generate(LONG, address, cache_salt=name.encode())
                assert answer.tokens == pair.expected(LONG)
                assert failures(reason) == before + 1, name
                assert liar.seconds_left is not None, "the request's deadline goes along"
                assert liar.seconds_left < 31  # the wire rounds up
                assert liar.lease_ms == 1000 * LEASE_SECONDS
        await pair.decode.until_idle()


async def test_a_bug_in_one_hand_off_leaves_the_other_sequences_alone(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: Any) -> None:
        raise ZeroDivisionError("a bug")

    async with start_pair(tiny) as pair:
        _, other = await pair.gateway.start(LONG, sampling=dataclasses.replace(GREEDY, max_tokens=100))
        monkeypatch.setattr(RemotePrefill, "fill", fail)
        answer = await pair.gateway.generate(prompt(30, seed=5), pair.prefill.address)
        assert answer.failure is not None
        assert "a bug" not in answer.failure.message
        assert "ZeroDivisionError: a bug" in caplog.text
        async with asyncio.timeout(20):
            await other.has_ended.wait()
        assert other.tokens == pair.expected(LONG, 100)
        await pair.until_idle()
