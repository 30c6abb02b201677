"""WeightService on the wire: loads models for workers, and serves the image that this node holds to other nodes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from weft.errors import InvalidRequest, NotFound, Overloaded
from weft.weights.formats import PIECE_BYTES, TensorEntry
from weft.weights.image import Image, image_content
from weft_mesh.v1 import weights_service_pb2 as pb2
from weft_mesh.v1 import weights_service_pb2_grpc as pb2_grpc
from weft_services.weights.loader import ReadProgress, WeightLoader

SERVICE_NAME = pb2.DESCRIPTOR.services_by_name["WeightService"].full_name
CHUNK_BYTES = 1 << 20
MAX_READ_BYTES = 4 * PIECE_BYTES
MAX_PARTS = 10_000
MAX_READS = 64


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """`size` bytes of a tensor from byte `first` on."""

    tensor: str
    first: int
    size: int


@dataclass(frozen=True, slots=True)
class HeldImage:
    """An image, the places of its tensors, and the piece digests of each."""

    image: Image
    entries: dict[str, TensorEntry]
    leaves: dict[str, bytes]


def draft_name(model: str) -> str:
    """Return the name under which the draft model of a model is loaded."""
    return f"{model}.draft"


class ImageServer:
    """Serves the image of one loader."""

    def __init__(self, loader: WeightLoader) -> None:
        self._loader = loader
        self._holding: HeldImage | None = None
        self._num_reads = 0

    async def held_image(self) -> HeldImage:
        """Return the current image. Raises NotFound while nothing is loaded."""
        while self._holding is None or self._holding.image is not self._loader.image:
            image = self._loader.image
            if image is None:
                raise NotFound("the model is not loaded here yet")
            # The image may be released meanwhile, and its descriptor reused.
            entries, leaves = await asyncio.to_thread(image_content, image)
            self._holding = HeldImage(image, {entry.name: entry for entry in entries}, leaves)
        return self._holding

    async def read(self, weights_hash: str, slices: Sequence[TensorSlice]) -> AsyncIterator[bytes]:
        """Yield the bytes of the slices one after another; the caller bounds their number.

        Raises NotFound, InvalidRequest, Overloaded.
        """
        holding = await self.held_image()
        if holding.image.weights_hash != weights_hash:
            raise NotFound(f"the weights {weights_hash} are not held here (any more)")
        places = [_place(holding, each) for each in slices]
        if sum(size for _, size in places) > MAX_READ_BYTES:
            raise InvalidRequest(f"at most {MAX_READ_BYTES} bytes at a time", "parts")
        with self._read_slot():
            fd = os.dup(holding.image.fd)  # the image may be released meanwhile
            try:
                for place, size in places:
                    for done in range(0, size, CHUNK_BYTES):
                        yield os.pread(fd, min(CHUNK_BYTES, size - done), place + done)
            finally:
                os.close(fd)

    @contextmanager
    def _read_slot(self) -> Iterator[None]:
        if self._num_reads >= MAX_READS:
            raise Overloaded(f"{MAX_READS} reads are under way")
        self._num_reads += 1
        try:
            yield
        finally:
            self._num_reads -= 1


def _place(holding: HeldImage, part: TensorSlice) -> tuple[int, int]:
    entry = holding.entries.get(part.tensor)
    if entry is None or part.first + part.size > entry.size_bytes:
        raise InvalidRequest(f"tensor {part.tensor!r} has no bytes {part.first} to {part.first + part.size}", "parts")
    return entry.offset + part.first, part.size


class WeightServicer(pb2_grpc.WeightServiceServicer):
    """Loads each model with its own loader, and serves loaded images to other nodes."""

    def __init__(self, loaders: Mapping[str, WeightLoader], drafts: Mapping[str, WeightLoader] | None = None) -> None:
        """`drafts`: loaders of draft models by the names of their targets."""
        self._drafts = {name: draft_name(name) for name in drafts or {}}
        self._loaders = {**loaders, **{draft_name(name): loader for name, loader in (drafts or {}).items()}}
        self._lenders = {name: ImageServer(loader) for name, loader in self._loaders.items()}

    async def Load(self, request: pb2.LoadRequest, context: Any) -> AsyncIterator[pb2.LoadResponse]:
        """Stream progress, and the ready message last."""
        self._check(request.model)
        async for event in self._loaders[request.model].load():
            if isinstance(event, ReadProgress):
                progress = pb2.LoadProgress(read_bytes=event.read_bytes, total_bytes=event.total_bytes, file=event.file)
                yield pb2.LoadResponse(progress=progress)
            else:
                ready = pb2.LoadReady(
                    shm_name=event.image.name,
                    size_bytes=event.image.size_bytes,
                    weights_hash=event.image.weights_hash,
                    config_json=event.config_json,
                    read_from_disk=event.read_from_disk,
                    source=event.source,
                    draft_model=self._drafts.get(request.model, ""),
                )
                yield pb2.LoadResponse(ready=ready)

    async def DescribeImage(self, request: pb2.DescribeImageRequest, context: Any) -> pb2.DescribeImageResponse:
        """Describe the image for another node."""
        self._check(request.model)
        held = await self._lenders[request.model].held_image()
        tensors = [
            pb2.ImageTensor(name=name, dtype=entry.dtype, shape=entry.shape, leaves=held.leaves[name])
            for name, entry in held.entries.items()
        ]
        return pb2.DescribeImageResponse(weights_hash=held.image.weights_hash, piece_bytes=PIECE_BYTES, tensors=tensors)

    async def ReadImage(self, request: pb2.ReadImageRequest, context: Any) -> AsyncIterator[pb2.ReadImageResponse]:
        """Stream the bytes of the requested parts."""
        self._check(request.model)
        if len(request.parts) > MAX_PARTS:  # before anything is allocated for them
            raise InvalidRequest(f"at most {MAX_PARTS} parts at a time", "parts")
        slices = [TensorSlice(part.tensor, part.first, part.size) for part in request.parts]
        async for data in self._lenders[request.model].read(request.weights_hash, slices):
            yield pb2.ReadImageResponse(data=data)

    def _check(self, model: str) -> None:
        if model not in self._loaders:
            names = ", ".join(map(repr, self._loaders))
            raise NotFound(f"no model {model!r} here; this service holds {names}")
