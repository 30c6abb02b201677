"""Decode's side of a Prefill call, driven by hand."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc

from tests.services.attach import new_key
from tests.services.workers import BLOCK_TOKENS, Worker, fingerprint_of, start_worker
from tests.weft.tiny_llama import Tiny
from weft.kv.transfer import (
    Accepted,
    Heartbeat,
    PrefillEvent,
    PrefillRequest,
    PromptFinished,
    ReadyBlocks,
)
from weft.request import RequestKey, SamplingParams
from weft.rpc.client import open_channel
from weft.rpc.wire import event_from_wire, key_to_wire, prefill_request_to_wire
from weft.worker.config import LEASE_SECONDS
from weft_mesh.v1 import prefill_service_pb2 as pb2
from weft_mesh.v1 import prefill_service_pb2_grpc
from weft_services.prefill.service import install


class Borrower:
    def __init__(self, stub: prefill_service_pb2_grpc.PrefillServiceAsyncStub, order: PrefillRequest) -> None:
        self.order = order
        self.stub = stub
        self.call = stub.Prefill()

    async def start(self) -> None:
        await self.call.write(pb2.PrefillRequest(start=prefill_request_to_wire(self.order)))

    async def renew(self) -> None:
        await self.call.write(pb2.PrefillRequest(renewal=pb2.LeaseRenewal()))

    async def done(self) -> None:
        await self.call.write(pb2.PrefillRequest(done=pb2.TransferDone()))

    async def next(self) -> PrefillEvent:
        """Return the next event other than a heartbeat."""
        while True:
            response = await self.call.read()
            assert isinstance(response, pb2.PrefillResponse), await self.call.code()
            event = event_from_wire(response)
            if not isinstance(event, Heartbeat):
                return event

    async def status(self) -> grpc.StatusCode:
        """Read to the end of the call and return its status."""
        with suppress(grpc.aio.AioRpcError):
            while await self.call.read() is not grpc.aio.EOF:
                pass
        code: grpc.StatusCode = await self.call.code()
        return code

    async def until_finished(self) -> tuple[list[ReadyBlocks], PromptFinished]:
        """Start, and return all blocks and the prompt's end."""
        await self.start()
        assert isinstance(await self.next(), Accepted)
        ready: list[ReadyBlocks] = []
        finished: PromptFinished | None = None
        num_blocks = -(-len(self.order.token_ids) // BLOCK_TOKENS)
        while finished is None or not ready or ready[-1].first_index + len(ready[-1].blocks) < num_blocks:
            event = await self.next()
            if isinstance(event, ReadyBlocks):
                ready.append(event)
            else:
                assert isinstance(event, PromptFinished)
                finished = event
        return ready, finished

    async def read(self, blocks: Sequence[int], key: RequestKey | None = None) -> bytes:
        request = pb2.ReadBlocksRequest(key=key_to_wire(key or self.order.key), blocks=blocks)
        return b"".join([chunk.data async for chunk in self.stub.ReadBlocks(request)])


@dataclasses.dataclass
class Lender:
    """A prefill worker, and callers for it."""

    worker: Worker
    stub: Any
    tiny: Tiny

    def borrower(self, token_ids: Sequence[int], **changes: Any) -> Borrower:
        order = PrefillRequest(
            key=new_key(),
            prefill_boot_id=self.worker.address.boot_id,
            fingerprint=fingerprint_of(self.tiny),
            token_ids=tuple(token_ids),
            sampling=SamplingParams(max_tokens=4),
        )
        return Borrower(self.stub, dataclasses.replace(order, **changes))


@asynccontextmanager
async def start_lender(tiny: Tiny, store: Any = None, lease_seconds: float = LEASE_SECONDS) -> AsyncIterator[Lender]:
    async with start_worker(tiny, "prefill-0", install, store=store, lease_seconds=lease_seconds) as worker:
        channel = open_channel(worker.address.address)
        yield Lender(worker, prefill_service_pb2_grpc.PrefillServiceStub(channel), tiny)
        await channel.close()
