"""WeightService on the wire."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

from weft.errors import NotFound
from weft_mesh.v1 import weights_service_pb2 as pb2
from weft_mesh.v1 import weights_service_pb2_grpc as pb2_grpc
from weft_services.weights.fetch import Progress, WeightLoader

SERVICE_NAME = pb2.DESCRIPTOR.services_by_name["WeightService"].full_name


class WeightServicer(pb2_grpc.WeightServiceServicer):
    """Serves each model by its own loader."""

    def __init__(self, loaders: Mapping[str, WeightLoader]) -> None:
        self._loaders = loaders

    async def Load(self, request: pb2.LoadRequest, context: Any) -> AsyncIterator[pb2.LoadResponse]:
        """Progress first, the ready message last."""
        loader = self._loaders.get(request.model)
        if loader is None:
            names = ", ".join(map(repr, self._loaders))
            raise NotFound(f"no model {request.model!r} here; this service holds {names}")
        async for event in loader.load():
            if isinstance(event, Progress):
                progress = pb2.LoadProgress(read_bytes=event.read_bytes, total_bytes=event.total_bytes, file=event.file)
                yield pb2.LoadResponse(progress=progress)
            else:
                ready = pb2.LoadReady(
                    shm_name=event.image.name,
                    size_bytes=event.image.size_bytes,
                    weights_hash=event.image.weights_hash,
                    config_json=event.config_json,
                    read_from_disk=event.read_from_disk,
                )
                yield pb2.LoadResponse(ready=ready)
