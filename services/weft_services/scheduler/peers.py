"""Calls to kvstore; the only room of the scheduler, beside its servicers, where wire messages are seen."""

from __future__ import annotations

from collections.abc import Sequence

from weft import trace
from weft.rpc.client import open_channel, translated
from weft_mesh.v1 import kvstore_service_pb2 as pb
from weft_mesh.v1.kvstore_service_pb2_grpc import KvStoreServiceStub
from weft_services.scheduler.located import Holding, Located
from weft_services.scheduler.store_watch import StoreUse

# an answer that nobody waits for any more is still worth having for so long
CALL_SECONDS = 0.5


class KvStore:
    """One kvstore over one channel."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address)
        self._stub = KvStoreServiceStub(self._channel)

    async def locate(self, fingerprint: bytes, keys: Sequence[bytes]) -> Located:
        """Who holds leading blocks of a prompt. Raises WeftError."""
        with translated():
            request = pb.LocateRequest(fingerprint=fingerprint, keys=keys)
            answer = await self._stub.Locate(request, timeout=CALL_SECONDS, metadata=trace.outgoing())
        workers = tuple(Holding(match.worker_id, match.boot_id, match.num_blocks) for match in answer.workers)
        on_disk = (number for number, tier in enumerate(answer.store) if tier == pb.STORE_TIER_NVME)
        return Located(workers, len(answer.store), next(on_disk, len(answer.store)))

    async def describe(self) -> StoreUse:
        """How full the store is. Raises WeftError."""
        with translated():
            answer = await self._stub.Describe(pb.DescribeRequest(), timeout=CALL_SECONDS)
        return StoreUse(answer.segment_bytes, answer.used_bytes, answer.disk_bytes, answer.disk_used_bytes)

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()
