"""The two places where a hand-off can be held and hurt: what prefill says, and the transport that moves the blocks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from tests.services.workers import Meddler, Worker
from weft.kv.transport import Lender, Run, TransferFailed
from weft.rpc.client import owned
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


class Relay(prefill_service_pb2_grpc.PrefillServiceServicer):
    """Between decode and a prefill worker. Holds the first event of the kind `at`, then passes it on `copies` times.

    The first blocks come in two events, the second one when the first has led to a pull: there always are two pulls.
    """

    def __init__(self, stub: Any, at: str, first_pull: asyncio.Event) -> None:
        self.hold = Hold()
        self._first_pull = first_pull
        self.copies = 1
        self._stub = stub
        self._at = at

    async def Prefill(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        async with owned(self._stub.Prefill(request_iterator)) as call:
            async for response in call:
                is_held = response.WhichOneof("event") == self._at and not self.hold.is_reached.is_set()
                if is_held:
                    await self.hold.stop()
                for _ in range(self.copies if is_held else 1):
                    for part in _parts(response):
                        yield part
                        if part is not response and len(part.blocks.blocks) == 1:
                            await self._first_pull.wait()

    async def Embed(self, request: Any, context: Any) -> Any:
        raise NotImplementedError("nobody asks")

    async def ReadBlocks(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async with owned(self._stub.ReadBlocks(request)) as call:
            async for response in call:
                yield response


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


class Hurt(Meddler):
    """A transport whose pull number `at` is held; after that it does what `fault` says.

    Whatever is written while nobody waits for it any more must hit blocks that are in quarantine.
    """

    def __init__(self, fault: str, at: int) -> None:
        super().__init__()
        self.hold = Hold()
        self.has_begun = asyncio.Event()
        self.victim: Worker
        self.num_late_blocks = 0
        self._fault = fault
        self._at = at

    async def pull(self, lender: Lender, runs: Sequence[Run], timeout_seconds: float) -> None:
        self.num_pulls += 1
        self.has_begun.set()
        is_held = self.num_pulls == self._at
        if is_held:
            await self.hold.stop()
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

    def _land(self, runs: Sequence[Run]) -> None:
        memory = self.victim.place.memory
        pool = self.victim.engine._loop._pool
        for run in runs:
            block = (run.local_address - memory.address) // memory.block_bytes
            assert block in pool._quarantined, f"block {block} is in use while a pull writes it"
            memory.write(block, 0, b"\xab" * memory.block_bytes)
            self.num_late_blocks += 1
