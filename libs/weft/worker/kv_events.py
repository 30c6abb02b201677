"""Reports to kvstore which blocks this worker's pool holds: numbered changes, and a snapshot on request.

If kvstore is away, only a routing hint is lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from weft.errors import WeftError
from weft.kv.block_pool import fingerprint_digest
from weft.request import ModelFingerprint
from weft.rpc.client import open_channel, rpc_errors_translated
from weft_mesh.v1 import kvstore_service_pb2 as pb2
from weft_mesh.v1 import kvstore_service_pb2_grpc as pb2_grpc

logger = logging.getLogger(__name__)
INTERVAL_SECONDS = 0.5
QUIET_INTERVALS = 8  # interval of empty reports
RPC_SECONDS = 2.0
MAX_KEYS = 16_384  # per message


class KvEventPublisher:
    """`on_changes` receives every step's changes; `run` is a background task."""

    def __init__(self, address: str, worker_id: str, boot_id: str, fingerprint: ModelFingerprint) -> None:
        self._address = address
        self._worker_id = worker_id
        self._boot_id = boot_id
        self._fingerprint = fingerprint_digest(fingerprint)
        self._held: set[bytes] = set()
        self._changes: dict[bytes, bool] = {}
        self._sequence = 0
        self._must_begin = True

    def on_changes(self, changes: Mapping[bytes, bool]) -> None:
        """Record keys added to the pool or removed from it. Pool and snapshot size bound the backlog."""
        if not self._address:
            return
        for key, is_held in changes.items():
            if is_held:
                self._held.add(key)
            else:
                self._held.discard(key)
        if not self._must_begin:
            self._changes.update(changes)
            # A snapshot is shorter than that many changes.
            self._must_begin = len(self._changes) > 2 * len(self._held) + MAX_KEYS

    async def run(self) -> None:
        """Report until cancelled. Never raises if kvstore is away."""
        if not self._address:
            return
        num_quiet = 0
        async with open_channel(self._address) as channel:
            stub: pb2_grpc.KvStoreServiceAsyncStub = pb2_grpc.KvStoreServiceStub(channel)
            while True:
                num_quiet += 1
                if self._must_begin or self._changes or num_quiet >= QUIET_INTERVALS:
                    num_quiet = 0
                    await self._report(stub)
                await asyncio.sleep(INTERVAL_SECONDS)

    async def _report(self, stub: pb2_grpc.KvStoreServiceAsyncStub) -> None:
        try:
            if self._must_begin:
                await self._send_snapshot(stub)
            else:
                await self._send_delta(stub)
        except WeftError as error:
            logger.debug("kv events not delivered error=%s", error)
            self._must_begin = True

    async def _send_snapshot(self, stub: pb2_grpc.KvStoreServiceAsyncStub) -> None:
        held = list(self._held)
        self._changes.clear()
        self._must_begin = False
        for first in range(0, max(1, len(held)), MAX_KEYS):
            await self._send(stub, held[first : first + MAX_KEYS], [], is_snapshot=first == 0)

    async def _send_delta(self, stub: pb2_grpc.KvStoreServiceAsyncStub) -> None:
        changes, self._changes = list(self._changes.items()), {}
        for first in range(0, max(1, len(changes)), MAX_KEYS):
            part = changes[first : first + MAX_KEYS]
            stored = [key for key, is_held in part if is_held]
            await self._send(stub, stored, [key for key, is_held in part if not is_held], is_snapshot=False)

    async def _send(
        self, stub: pb2_grpc.KvStoreServiceAsyncStub, stored: list[bytes], removed: list[bytes], *, is_snapshot: bool
    ) -> None:
        self._sequence += 1
        request = pb2.ReportBlocksRequest(
            worker_id=self._worker_id,
            boot_id=self._boot_id,
            fingerprint=self._fingerprint,
            sequence=self._sequence,
            is_snapshot=is_snapshot,
            stored=stored,
            removed=removed,
        )
        with rpc_errors_translated():
            response = await stub.ReportBlocks(request, timeout=RPC_SECONDS)
        self._must_begin = self._must_begin or response.must_begin
