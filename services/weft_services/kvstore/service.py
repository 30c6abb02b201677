"""gRPC servicer of KvStoreService: checks bounds and converts messages."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from weft import metrics, trace
from weft.errors import InvalidRequest
from weft.kv.block_pool import Tier
from weft.rpc.wire import retention_from_wire
from weft_mesh.v1 import kvstore_service_pb2 as pb2
from weft_mesh.v1 import kvstore_service_pb2_grpc as pb2_grpc
from weft_services.kvstore.block_index import BlockReport, PoolIndex, StoredBlock
from weft_services.kvstore.node import PROTOCOL, FoundBlock, NodeStore

SERVICE_NAME = pb2.DESCRIPTOR.services_by_name["KvStoreService"].full_name
FINGERPRINT_BYTES = 16
MAX_KEY_BYTES = 64
MAX_MATCH_KEYS = 65_536
MAX_PUBLISH_BLOCKS = 1024
MAX_PROMOTE_KEYS = 1024
MAX_TENANT_BYTES = 8
MAX_NAME = 256
TIERS = {Tier.DRAM: pb2.STORE_TIER_DRAM, Tier.NVME: pb2.STORE_TIER_NVME}


class KvStoreServicer(pb2_grpc.KvStoreServiceServicer):
    """The service. Calls that need the store fail with UNAVAILABLE while it is down."""

    def __init__(self, store: NodeStore, places: PoolIndex) -> None:
        self._store = store
        self._places = places

    async def Describe(self, request: pb2.DescribeRequest, context: Any) -> pb2.DescribeResponse:
        """Return how to reach the store, and how full it is."""
        running = self._store.running
        return pb2.DescribeResponse(
            master_address=running.master.address,
            boot_id=running.boot_id,
            segment_bytes=self._store.place.segment_bytes,
            num_blocks=len(self._store.index),
            num_disk_blocks=len(self._store.disk) if self._store.disk is not None else 0,
            protocol=PROTOCOL,
            used_bytes=self._store.index.used_bytes,
            disk_bytes=self._store.disk.max_bytes if self._store.disk is not None else 0,
            disk_used_bytes=self._store.disk.used_bytes if self._store.disk is not None else 0,
        )

    async def Match(self, request: pb2.MatchRequest, context: Any) -> pb2.MatchResponse:
        """Return the longest run of leading blocks in the store, or the state of each key."""
        _check(request.fingerprint, request.keys, MAX_MATCH_KEYS, "keys")
        find = self._store.find if request.each else self._store.match
        with trace.server_span("match", trace.incoming(context.invocation_metadata())) as span:
            found = await find(request.fingerprint, request.keys)
            if span is not None:
                span.set({"weft.keys": len(request.keys), "weft.found": sum(block is not None for block in found)})
        return match_to_wire(found, self._store.promote_wait_seconds)

    async def Promote(self, request: pb2.PromoteRequest, context: Any) -> pb2.PromoteResponse:
        """Copy blocks from the disk into the store's memory."""
        _check(request.fingerprint, request.keys, MAX_PROMOTE_KEYS, "keys")
        with trace.server_span("promote", trace.incoming(context.invocation_metadata())) as span:
            promotion = await self._store.promote(request.fingerprint, request.keys)
            if span is not None:
                span.set({"weft.keys": len(request.keys), "weft.promoted": promotion.num_blocks})
        waited_ms = round(1000 * promotion.waited_seconds)
        return pb2.PromoteResponse(num_promoted=promotion.num_blocks, waited_ms=waited_ms)

    async def Publish(self, request: pb2.PublishRequest, context: Any) -> pb2.PublishResponse:
        """Index blocks that a worker has stored."""
        _check(request.fingerprint, [block.key for block in request.blocks], MAX_PUBLISH_BLOCKS, "blocks")
        if any(len(block.tenant) > MAX_TENANT_BYTES for block in request.blocks):
            raise InvalidRequest(f"blocks: tenant must have at most {MAX_TENANT_BYTES} bytes", "blocks")
        if not all(block.size_bytes for block in request.blocks):
            raise InvalidRequest("blocks: size_bytes must be at least 1", "blocks")
        now = time.time()
        blocks = [
            StoredBlock(
                *(block.key, block.checksum, block.size_bytes, block.tenant, now),
                retention_from_wire(block.retention),
            )
            for block in request.blocks
        ]
        self._store.published(request.fingerprint, blocks)
        return pb2.PublishResponse()

    async def ReportBlocks(self, request: pb2.ReportBlocksRequest, context: Any) -> pb2.ReportBlocksResponse:
        """Apply a report about a worker's own pool."""
        _check(request.fingerprint, request.stored, MAX_MATCH_KEYS, "stored")
        _check(request.fingerprint, request.removed, MAX_MATCH_KEYS, "removed")
        if not 0 < len(request.worker_id) <= MAX_NAME:
            raise InvalidRequest(f"worker_id: must have 1 to {MAX_NAME} characters", "worker_id")
        is_understood = self._places.report(report_from_wire(request))
        if not is_understood:
            metrics.INDEX_RESYNCS.inc()
        return pb2.ReportBlocksResponse(must_begin=not is_understood)

    async def Locate(self, request: pb2.LocateRequest, context: Any) -> pb2.LocateResponse:
        """Return the holders of leading blocks of a prompt; also works while the store is down."""
        _check(request.fingerprint, request.keys, MAX_MATCH_KEYS, "keys")
        with trace.server_span("locate", trace.incoming(context.invocation_metadata())):
            return pb2.LocateResponse(
                workers=[
                    pb2.WorkerMatch(worker_id=match.worker_id, boot_id=match.boot_id, num_blocks=match.num_blocks)
                    for match in self._places.locate(request.fingerprint, request.keys)
                ],
                store=[TIERS[tier] for tier in self._store.known_run(request.fingerprint, request.keys)],
            )


def report_from_wire(request: pb2.ReportBlocksRequest) -> BlockReport:
    """Copy the keys out of the message, once."""
    return BlockReport(
        request.worker_id,
        request.boot_id,
        request.fingerprint,
        request.sequence,
        request.is_snapshot,
        list(request.stored),
        list(request.removed),
    )


def match_to_wire(found: Sequence[FoundBlock | None], promote_wait_seconds: float) -> pb2.MatchResponse:
    """Convert a match; a missing block has checksum 0 and no tier."""
    return pb2.MatchResponse(
        checksums=[block.checksum if block else 0 for block in found],
        tiers=[TIERS[block.tier] if block else pb2.STORE_TIER_UNSPECIFIED for block in found],
        promote_wait_ms=round(1000 * promote_wait_seconds),
    )


def _check(fingerprint: bytes, keys: Any, max_keys: int, field: str) -> None:
    if len(fingerprint) != FINGERPRINT_BYTES:
        raise InvalidRequest(
            f"fingerprint: expected {FINGERPRINT_BYTES} bytes, found {len(fingerprint)}", "fingerprint"
        )
    if len(keys) > max_keys:
        raise InvalidRequest(f"{field}: at most {max_keys}, found {len(keys)}", field)
    if any(not 0 < len(key) <= MAX_KEY_BYTES for key in keys):
        raise InvalidRequest(f"{field}: a key must have 1 to {MAX_KEY_BYTES} bytes", field)
