"""Where a request can be held and hurt: what prefill says, the transport that moves the blocks, decode's engine."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

from tests.services.workers import Meddler, Worker
from weft.engine.messages import StepOutput
from weft.kv.block_pool import BlockPool
from weft.kv.transfer import CopyRange, KvSource, TransferFailed
from weft.request import RequestKey
from weft.rpc.client import cancelled_on_exit
from weft_mesh.v1 import prefill_service_pb2 as pb2
from weft_mesh.v1 import prefill_service_pb2_grpc


class Hold:
    """A place where something waits, once."""

    def __init__(self) -> None:
        self.is_reached = asyncio.Event()
        self.opening = asyncio.Event()

    async def stop(self) -> None:
        """Say so and wait."""
        self.is_reached.set()
        await self.opening.wait()


class Halt:
    """Decode's engine stops behind the step that gave the victim's second token, the first that is its own."""

    def __init__(self) -> None:
        self.is_reached = asyncio.Event()
        self.opening = threading.Event()
        self._loop = asyncio.get_running_loop()

    def watch(self, worker: Worker, key: RequestKey) -> None:
        """From the engine's own thread: it gets no further, however slow the loop is to notice."""
        engine_loop, tokens = worker.engine._loop, Counter[RequestKey]()
        tell = engine_loop._listener

        def listener(output: StepOutput) -> None:
            tell(output)
            for delta in output.deltas:
                tokens[delta.key] += len(delta.token_ids)
            if tokens[key] > 1 and not self.opening.is_set():
                self._loop.call_soon_threadsafe(self.is_reached.set)
                self.opening.wait(60)

        engine_loop._listener = listener


class Relay(prefill_service_pb2_grpc.PrefillServiceServicer):
    """Between decode and a prefill worker. Holds the first event of the kind `at`, then passes it on `copies` times.

    The first blocks come in two events, the second one when the first has led to a pull: there always are two pulls.
    What decode says is passed on as often as `said` has it by its kind, once if it does not; `num_said` counts it.
    `heard`: the kinds of what prefill said.
    """

    def __init__(self, stub: Any, at: str, first_pull: asyncio.Event) -> None:
        self.hold = Hold()
        self._first_pull = first_pull
        self.copies = 1
        self.said: dict[str, int] = {}
        self.num_said: Counter[str] = Counter()
        self.heard: list[str] = []
        self._stub = stub
        self._at = at

    async def Prefill(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        async with cancelled_on_exit(self._stub.Prefill(self._requests(request_iterator))) as call:
            async for response in call:
                self.heard.append(response.WhichOneof("event"))
                is_held = self.heard[-1] == self._at and not self.hold.is_reached.is_set()
                if is_held:
                    await self.hold.stop()
                for _ in range(self.copies if is_held else 1):
                    for part in _parts(response):
                        yield part
                        if part is not response and len(part.blocks.blocks) == 1:
                            await self._first_pull.wait()

    async def _requests(self, request_iterator: Any) -> AsyncIterator[Any]:
        async for request in request_iterator:
            kind = request.WhichOneof("message")
            for _ in range(self.said.get(kind, 1)):
                yield request
            self.num_said[kind] += 1
        if 0 in self.said.values():
            await asyncio.Event().wait()  # what is lost is not made good by the stream's end

    async def Embed(self, request: Any, context: Any) -> Any:
        raise NotImplementedError("nobody asks")

    async def ReadBlocks(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async with cancelled_on_exit(self._stub.ReadBlocks(request)) as call:
            async for response in call:
                yield response


def _is_ours(pool: BlockPool, block: int) -> bool:
    is_private = pool._refs.get(block) == 1 and block not in pool._key_of
    return is_private or block in pool._quarantined


def _parts(response: pb2.PrefillResponse) -> list[pb2.PrefillResponse]:
    """Of several blocks the first, and the others; of anything else, itself."""
    if len(response.blocks.blocks) < 2:
        return [response]
    head, rest = pb2.PrefillResponse(), pb2.PrefillResponse()
    head.CopyFrom(response)
    rest.CopyFrom(response)
    del head.blocks.blocks[1:], head.blocks.checksums[1:]
    del rest.blocks.blocks[0], rest.blocks.checksums[0]
    rest.blocks.first_index += 1
    return [head, rest]


CANARY = b"\x5a"


class Hurt(Meddler):
    """A transport whose pull number `at` is held; after that it does what `fault` says.

    Every pull writes canaries over all that it was given to write, at its beginning and once more after it was held,
    and checks at its end that none of it was free or findable meanwhile: whoever else used it would get wrong tokens.
    Whatever is written while nobody waits for it any more must hit blocks that are in quarantine.
    """

    def __init__(self, fault: str, at: int) -> None:
        super().__init__()
        self.hold = Hold()
        self.has_begun = asyncio.Event()
        self.victim: Worker
        self.num_late_blocks = 0
        self.num_canaries = 0
        self._fault = fault
        self._at = at

    async def pull(self, lender: KvSource, runs: Sequence[CopyRange], timeout_seconds: float) -> None:
        self.num_pulls += 1
        self.has_begun.set()
        is_held = self.num_pulls == self._at
        self._sing(runs)
        if is_held:
            await self.hold.stop()
            self._sing(runs)
        try:
            await self._pull(lender, runs, timeout_seconds, is_held)
        finally:
            self._expect_ours(runs)

    async def _pull(self, lender: KvSource, runs: Sequence[CopyRange], timeout_seconds: float, is_held: bool) -> None:
        if is_held and self._fault == "fails":
            raise TransferFailed("torn")
        if is_held and self._fault == "lands late":
            self._land(runs)
            raise TransferFailed("timed out, and landed")
        await self.inner.pull(lender, runs, timeout_seconds)
        if is_held and self._fault == "damages":
            memory = self.victim.place.memory
            block = (runs[-1].local_address - memory.address) // memory.block_bytes
            memory.write(block, 5, bytes([memory.read(block)[5] ^ 1]))

    def _land(self, runs: Sequence[CopyRange]) -> None:
        memory = self.victim.place.memory
        pool = self.victim.engine._loop._pool
        for block in self._targets(runs):
            assert block in pool._quarantined, f"block {block} is in use while a pull writes it"
            memory.write(block, 0, b"\xab" * memory.block_bytes)
            self.num_late_blocks += 1

    def _sing(self, runs: Sequence[CopyRange]) -> None:
        self._expect_ours(runs)
        memory = self.victim.place.memory
        for block in self._targets(runs):
            memory.write(block, 0, CANARY * memory.block_bytes)
            self.num_canaries += 1

    def _expect_ours(self, runs: Sequence[CopyRange]) -> None:
        """Held by the sequence that they are for, or in quarantine: of no use to anybody else."""
        pool = self.victim.engine._loop._pool
        for block in self._targets(runs):
            if not _is_ours(pool, block):
                time.sleep(0.01)  # the engine's thread may be putting it into quarantine just now
                assert _is_ours(pool, block), f"block {block} is somebody else's while a pull may write it"

    def _targets(self, runs: Sequence[CopyRange]) -> list[int]:
        memory = self.victim.place.memory
        return [(run.local_address - memory.address) // memory.block_bytes for run in runs]
