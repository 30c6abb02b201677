"""WeightService on the wire."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from weft.errors import NotFound
from weft.weights.formats import PIECE_BYTES
from weft_mesh.v1 import weights_service_pb2 as pb2
from weft_mesh.v1 import weights_service_pb2_grpc as pb2_grpc
from weft_services.weights.image_server import ImageServer, TensorSlice, check_parts
from weft_services.weights.loader import ReadProgress, WeightLoader

SERVICE_NAME = pb2.DESCRIPTOR.services_by_name["WeightService"].full_name


class WeightServicer(pb2_grpc.WeightServiceServicer):
    """Loads each model with its own loader, and serves loaded images to other nodes."""

    def __init__(self, loaders: Mapping[str, WeightLoader]) -> None:
        self._loaders = loaders
        self._lenders = {name: ImageServer(loader) for name, loader in loaders.items()}

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
        check_parts(len(request.parts))
        slices = [TensorSlice(part.tensor, part.first, part.size) for part in request.parts]
        async for data in self._lenders[request.model].read(request.weights_hash, slices):
            yield pb2.ReadImageResponse(data=data)

    def _check(self, model: str) -> None:
        if model not in self._loaders:
            names = ", ".join(map(repr, self._loaders))
            raise NotFound(f"no model {model!r} here; this service holds {names}")
