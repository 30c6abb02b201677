"""Calls of the gateway to prefill workers, which are those for embeddings; their wire messages are seen here alone."""

from __future__ import annotations

from weft.errors import BadCheckpoint, Cancelled, PeerLost
from weft.request import WorkerAddress
from weft.rpc import wire
from weft.rpc.client import ChannelPool, translated
from weft_mesh.v1 import prefill_service_pb2 as prefill_pb
from weft_mesh.v1.prefill_service_pb2_grpc import PrefillServiceStub
from weft_services.gateway.mesh.placement import EmbedOrder


class PrefillPeers:
    """One channel a worker."""

    def __init__(self) -> None:
        self._channels = ChannelPool()

    async def embed(self, worker: WorkerAddress, order: EmbedOrder, seconds: float) -> tuple[float, ...]:
        """The mean hidden state. Raises WeftError."""
        request = prefill_pb.PrefillServiceEmbedRequest(
            key=wire.key_to_wire(order.key),
            prefill_boot_id=worker.boot_id,
            token_ids=order.token_ids,
            priority=order.priority,
            cache_salt=order.cache_salt,
        )
        try:
            async with self._channels.lend(worker.address) as channel:
                with translated():
                    response = await PrefillServiceStub(channel).Embed(request, timeout=seconds)
        except (BadCheckpoint, Cancelled) as error:  # it is another boot, or going away
            raise PeerLost(str(error)) from error
        return tuple(response.values)

    async def close(self) -> None:
        """Close the channels."""
        await self._channels.close()
