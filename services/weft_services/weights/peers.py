"""Client of another node's weights service: describes its image and reads runs of it."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import grpc

from weft.errors import Incompatible, Overloaded, PeerLost, WeftError
from weft.rpc.client import cancelled_on_exit, open_channel, rpc_errors_translated
from weft.weights.formats import PIECE_BYTES, PieceRun, ReadBuffers, RunReader
from weft.weights.load import DIGEST_BYTES, ImageLayout, num_pieces
from weft_mesh.v1 import weights_service_pb2 as pb2
from weft_mesh.v1 import weights_service_pb2_grpc as pb2_grpc

DESCRIBE_SECONDS = 10.0
READ_SECONDS = 30.0
BUSY_SECONDS = 60.0
"""Total time for one run while the other node is overloaded."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.02, 1.0


@dataclass(frozen=True, slots=True)
class PeerImage:
    """The image of the other node; `leaves` are the piece digests of its tensors."""

    weights_hash: str
    leaves: dict[str, bytes]


class WeightsPeer:
    """One other weights service, on the event loop that created it; any other thread may read runs."""

    def __init__(self, address: str, model: str) -> None:
        self.address = address
        self._model = model
        self._channel = open_channel(address)
        self._stub: pb2_grpc.WeightServiceAsyncStub = pb2_grpc.WeightServiceStub(self._channel)
        self._loop = asyncio.get_running_loop()

    async def close(self) -> None:
        """Close the channel; no thread may be reading."""
        await self._channel.close()

    async def describe(self, layout: ImageLayout) -> PeerImage:
        """Describe the image. Raises Incompatible for other tensors, PeerLost or NotFound if there is nothing to
        read."""
        with rpc_errors_translated():
            answer = await self._stub.DescribeImage(
                pb2.DescribeImageRequest(model=self._model), timeout=DESCRIBE_SECONDS
            )
        theirs = {tensor.name: (tensor.dtype, tuple(tensor.shape)) for tensor in answer.tensors}
        if theirs != {entry.name: (entry.dtype, entry.shape) for entry in layout.entries}:
            raise Incompatible(f"{self.address} holds another model under the name {self._model!r}")
        leaves = {tensor.name: tensor.leaves for tensor in answer.tensors}
        is_cut_alike = all(len(leaves[entry.name]) == DIGEST_BYTES * num_pieces(entry) for entry in layout.entries)
        if answer.piece_bytes != PIECE_BYTES or not is_cut_alike:
            raise Incompatible(
                f"{self.address} cuts tensors into pieces of {answer.piece_bytes} bytes, not {PIECE_BYTES}"
            )
        return PeerImage(answer.weights_hash, leaves)

    def reader(self, image: PeerImage) -> RunReader:
        """Return a reader of the described image for threads other than the loop's; it raises PeerLost."""

        def read(run: PieceRun, memory: ReadBuffers) -> memoryview:
            # Not into the image: the event loop would touch new pages and block its other tasks.
            target = memory.reusable(run.size)
            asyncio.run_coroutine_threadsafe(self._read(image.weights_hash, run, target), self._loop).result()
            return target

        return read

    async def _read(self, weights_hash: str, run: PieceRun, target: memoryview) -> None:
        """Read a run, with retries while the other node is overloaded. Raises PeerLost."""
        deadline, pause = self._loop.time() + BUSY_SECONDS, FIRST_PAUSE_SECONDS
        while True:
            try:
                return await self._read_once(weights_hash, run, target)
            except Overloaded as error:
                if self._loop.time() + pause > deadline:
                    raise PeerLost(f"{self.address} has been busy for {BUSY_SECONDS:g} s: {error}") from error
            await asyncio.sleep(pause * random.uniform(0.5, 1.5))  # jitter between rejected readers
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    async def _read_once(self, weights_hash: str, run: PieceRun, target: memoryview) -> None:
        """Read a run once. Raises PeerLost, Overloaded."""
        parts = [pb2.TensorPart(tensor=part.entry.name, first=part.first, size=part.size) for part in run.pieces]
        request = pb2.ReadImageRequest(model=self._model, weights_hash=weights_hash, parts=parts)
        done = 0
        try:
            async with cancelled_on_exit(self._stub.ReadImage(request, timeout=READ_SECONDS)) as call:
                async for response in call:
                    target[done : done + len(response.data)] = response.data
                    done += len(response.data)
        except Overloaded:
            raise
        except (WeftError, ValueError, grpc.aio.UsageError) as error:
            raise PeerLost(f"{self.address}: {error}") from error
        if done != run.size:
            raise PeerLost(f"{self.address} sent {done} of {run.size} bytes")
