"""KvStoreService on the wire."""

from __future__ import annotations

from typing import Any

from weft.errors import InvalidRequest
from weft_mesh.v1 import kvstore_service_pb2 as pb2
from weft_mesh.v1 import kvstore_service_pb2_grpc as pb2_grpc
from weft_services.kvstore.index import StoredBlock
from weft_services.kvstore.node import PROTOCOL, NodeStore

SERVICE_NAME = pb2.DESCRIPTOR.services_by_name["KvStoreService"].full_name
FINGERPRINT_BYTES = 16
MAX_KEY_BYTES = 64
MAX_MATCH_KEYS = 65_536
MAX_PUBLISH_BLOCKS = 1024


class KvStoreServicer(pb2_grpc.KvStoreServiceServicer):
    """Every rpc answers UNAVAILABLE while the store is away."""

    def __init__(self, store: NodeStore) -> None:
        self._store = store

    async def Describe(self, request: pb2.DescribeRequest, context: Any) -> pb2.DescribeResponse:
        """How to reach the store itself."""
        running = self._store.running
        return pb2.DescribeResponse(
            master_address=running.master.address,
            boot_id=running.boot_id,
            segment_bytes=self._store.place.segment_bytes,
            num_blocks=len(self._store.index),
            protocol=PROTOCOL,
        )

    async def Match(self, request: pb2.MatchRequest, context: Any) -> pb2.MatchResponse:
        """The longest run of leading keys whose blocks are all in the store now, or what there is of each."""
        _check(request.fingerprint, request.keys, MAX_MATCH_KEYS, "keys")
        if request.each:
            sums = await self._store.find(request.fingerprint, request.keys)
            return pb2.MatchResponse(checksums=[sums.get(key, 0) for key in request.keys])
        found = await self._store.match(request.fingerprint, request.keys)
        return pb2.MatchResponse(checksums=[block.checksum for block in found])

    async def Publish(self, request: pb2.PublishRequest, context: Any) -> pb2.PublishResponse:
        """These blocks have been put."""
        _check(request.fingerprint, [block.key for block in request.blocks], MAX_PUBLISH_BLOCKS, "blocks")
        _ = self._store.running
        blocks = [StoredBlock(block.key, block.checksum, block.size_bytes) for block in request.blocks]
        self._store.index.add(request.fingerprint, blocks)
        return pb2.PublishResponse()


def _check(fingerprint: bytes, keys: Any, max_keys: int, field: str) -> None:
    if len(fingerprint) != FINGERPRINT_BYTES:
        raise InvalidRequest(
            f"fingerprint: expected {FINGERPRINT_BYTES} bytes, found {len(fingerprint)}", "fingerprint"
        )
    if len(keys) > max_keys:
        raise InvalidRequest(f"{field}: at most {max_keys}, found {len(keys)}", field)
    if any(not 0 < len(key) <= MAX_KEY_BYTES for key in keys):
        raise InvalidRequest(f"{field}: a key has 1 to {MAX_KEY_BYTES} bytes", field)
