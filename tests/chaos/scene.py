"""A pair of workers in this process, a sequence that is to be hurt, and one beside it that must not notice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.relay import Halt, Hold, Hurt, Relay
from tests.services.attach import Answer, Gateway, new_key, prompt
from tests.services.workers import Pair, Worker, start_pair, start_worker
from tests.weft.tiny_llama import Tiny
from weft.asyncio_compat import background_tasks
from weft.engine.messages import EngineLoad
from weft.engine.sequence import SequenceState
from weft.request import RequestKey, SamplingParams, WorkerAddress
from weft.rpc.server import RpcServer
from weft_mesh.v1 import prefill_service_pb2_grpc
from weft_services.prefill.service import install as install_prefill

ENDLESS = SamplingParams(max_tokens=120, ignore_eos=True)
VICTIM, OTHER = prompt(45, seed=21), prompt(11, seed=22)
VICTIM_TOKENS, NUM_BLOCKS = 12, 96


@dataclass
class Scene:
    """`lender` is where the victim's prompt is sent: the relay, which is prefill to whoever asks."""

    pair: Pair
    relay: Relay
    hurt: Hurt
    lender: WorkerAddress
    gateway: Gateway
    key: RequestKey | None = None
    answer: Answer | None = None
    halt: Halt = field(default_factory=Halt)

    async def start(self, **fields: Any) -> None:
        """The victim."""
        sampling = SamplingParams(max_tokens=VICTIM_TOKENS, ignore_eos=True)
        self.key, self.answer = await self.gateway.start(VICTIM, self.lender, sampling=sampling, **fields)

    async def start_decoding(self, **fields: Any) -> None:
        """The victim; decode's engine stands in the midst of its answer, until `open` or `forgotten`."""
        key = new_key()
        self.halt.watch(self.pair.decode, key)
        await self.start(key=key, **fields)
        await self.reached(self.halt)
        assert self.answer is not None
        assert not self.answer.has_ended.is_set()
        sequence = self.pair.decode.engine._loop._scheduler.live[key]
        assert sequence.state is SequenceState.RUNNING
        assert len(sequence.token_ids) == len(VICTIM) + 2

    async def expect_text(self) -> None:
        """The victim ends well, with the tokens of an undisturbed one."""
        assert self.answer is not None
        async with asyncio.timeout(20):
            await self.answer.has_ended.wait()
        assert self.answer.failure is None, self.answer.failure
        assert self.answer.tokens == self.pair.expected(VICTIM, VICTIM_TOKENS)

    async def expect_failure(self, code: int) -> None:
        """The victim ends with this status."""
        assert self.answer is not None
        async with asyncio.timeout(20):
            await self.answer.has_ended.wait()
        assert self.answer.failure is not None
        assert self.answer.failure.code == code

    def open(self) -> None:
        """Whatever is held goes on."""
        for hold in (self.relay.hold, self.hurt.hold, self.halt):
            hold.opening.set()

    async def reached(self, hold: Hold | Halt) -> None:
        """The victim is where it is to be hurt."""
        try:
            async with asyncio.timeout(20):
                await hold.is_reached.wait()
        except TimeoutError:
            assert self.answer is not None
            raise AssertionError(
                f"never there: prefill said {self.relay.heard}, decode {dict(self.relay.num_said)}, "
                f"{self.hurt.num_pulls} pulls, tokens {self.answer.tokens}, failure {self.answer.failure}; "
                f"prefill {self.pair.prefill.load}, decode {self.pair.decode.load}"
            ) from None

    async def forgotten(self) -> None:
        """Decode has let go of the victim; the bystander may be over by then."""
        engine = self.pair.decode.engine
        if self.halt.is_reached.is_set():
            async with asyncio.timeout(20):
                while not engine._commands._items:  # noqa: ASYNC110 (until decode has told the engine, which stands)
                    await asyncio.sleep(0.005)
            self.halt.opening.set()
        live = engine._loop._scheduler.live
        await self.pair.decode.until_load(lambda _: self.key not in live)

    @asynccontextmanager
    async def another_boot(self) -> AsyncIterator[Worker]:
        """Prefill dies, and another process listens on the same port."""
        old = self.pair.prefill
        await old.rpc.stop(0)
        port = int(old.address.address.rpartition(":")[2])
        async with start_worker(
            self.pair.tiny, "prefill-0", install_prefill, boot_id="another boot", port=port
        ) as worker:
            yield worker


@asynccontextmanager
async def scene_of(
    tiny: Tiny, event: str, hurt: Hurt, lease_seconds: float, transport: str = "grpc"
) -> AsyncIterator[Scene]:
    """Held where prefill says `event`, or by the transport. At the end: the bystander's tokens, and every block."""
    async with (
        start_pair(tiny, transport, hurt, num_blocks=NUM_BLOCKS, lease_seconds=lease_seconds) as pair,
        pair.decode.place.channels.channel(pair.prefill.address.address) as channel,
    ):
        hurt.victim = pair.decode
        relay = Relay(prefill_service_pb2_grpc.PrefillServiceStub(channel), event, hurt.has_begun)
        rpc = RpcServer([])
        prefill_service_pb2_grpc.add_PrefillServiceServicer_to_server(relay, rpc.server)
        lender = WorkerAddress("prefill-0", pair.prefill.address.boot_id, await rpc.start("127.0.0.1", 0))
        try:
            async with background_tasks() as tasks:
                gateway = Gateway(pair.decode.address, tasks)
                _, bystander = await pair.gateway.start(OTHER, sampling=ENDLESS)
                await bystander.has_begun.wait()
                scene = Scene(pair, relay, hurt, lender, gateway)
                try:
                    yield scene
                finally:
                    scene.open()
                async with asyncio.timeout(20):
                    await bystander.has_ended.wait()
                await expect_nothing_amiss(pair, bystander, VICTIM)
                assert (hurt.num_canaries > 0) == (hurt.num_pulls > 0)
                await gateway.leave()
        finally:
            await rpc.stop(0)


async def expect_nothing_amiss(pair: Pair, bystander: Answer, victim: tuple[int, ...]) -> None:
    """The bystander's tokens, good blocks, and every one of them there."""
    assert bystander.failure is None
    assert bystander.tokens == pair.expected(OTHER, ENDLESS.max_tokens)
    # whoever comes next finds good blocks, in the cache and elsewhere
    for token_ids in (victim, prompt(40, seed=23)):
        answer = await pair.gateway.generate(token_ids)
        assert answer.tokens == pair.expected(token_ids)
    for worker in (pair.prefill, pair.decode):
        if worker.load == EngineLoad():
            continue  # the order was lost: this one has done nothing yet, and said nothing
        load = await worker.until_load(lambda load: not (load.active_blocks or load.quarantined_blocks))
        assert load.free_blocks + load.cached_blocks == worker.place.memory.num_blocks
        assert (load.num_running, load.num_waiting, load.active_tokens) == (0, 0, 0)
