"""DecodeService: one gateway's stream, its sequences' tasks, its frames."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import grpc

from weft.request import RequestKey, WorkerRole
from weft.rpc.wire import (
    address_from_wire,
    drafts_to_wire,
    finish_to_wire,
    key_from_wire,
    key_to_wire,
    logprobs_to_wire,
    prompt_logprobs_to_wire,
    retention_from_wire,
    sampling_from_wire,
    speculation_from_wire,
    usage_to_wire,
)
from weft.worker.engine_client import EngineClient
from weft.worker.kv_pull import KvPuller, Quarantine
from weft.worker.process import RoleService, WorkerContext
from weft_mesh.v1 import decode_service_pb2, decode_service_pb2_grpc
from weft_services.decode.remote_prefill import PrefillClient, RemotePrefill
from weft_services.decode.sequences import DecodeSequence, DecodeUpdate, Outbox, SequenceManager, SequenceRequest

# Frames that a gateway may lag behind.
MAX_FRAMES = 1024
Requests = AsyncIterator[decode_service_pb2.AttachRequest]


class DecodeServicer(decode_service_pb2_grpc.DecodeServiceServicer):
    """A gateway's sequences run in its stream's task group and end with it."""

    def __init__(self, manager: SequenceManager) -> None:
        self._manager = manager

    # A coroutine that writes, not a generator: it holds a TaskGroup over its responses.
    async def Attach(  # type: ignore[override]
        self, request_iterator: Requests, context: Any
    ) -> None:
        outbox = Outbox[DecodeUpdate](MAX_FRAMES)
        async with asyncio.TaskGroup() as group:
            writer = group.create_task(_write(outbox, context))
            watcher = group.create_task(outbox.until_overflow())
            sequences: dict[RequestKey, asyncio.Task[None]] = {}
            async for request in request_iterator:
                if request.WhichOneof("command") == "start":
                    sequence = sequence_from_wire(request.start)
                    if sequence.key not in sequences:  # a repeated start of a running key changes nothing
                        _start(group, sequences, sequence.key, self._manager.run(sequence, outbox))
                elif (task := sequences.get(key_from_wire(request.cancel.key))) is not None:
                    task.cancel()
            for task in (*sequences.values(), writer, watcher):
                task.cancel()


def _start(
    group: asyncio.TaskGroup,
    sequences: dict[RequestKey, asyncio.Task[None]],
    key: RequestKey,
    life: Coroutine[Any, Any, None],
) -> None:
    task = group.create_task(life)
    sequences[key] = task
    task.add_done_callback(lambda _: sequences.pop(key, None))


async def _write(outbox: Outbox[DecodeUpdate], context: Any) -> None:
    while True:
        frame = await outbox.get()
        await context.write(decode_service_pb2.AttachResponse(deltas=[update_to_wire(delta) for delta in frame]))


def sequence_from_wire(start: decode_service_pb2.StartSequence) -> SequenceRequest:
    return SequenceRequest(
        key=key_from_wire(start.key),
        decode_boot_id=start.decode_boot_id,
        prefill=address_from_wire(start.prefill) if start.HasField("prefill") else None,
        token_ids=tuple(start.token_ids),
        sampling=sampling_from_wire(start.sampling),
        remaining_seconds=start.remaining_ms / 1000,
        cache_salt=start.cache_salt,
        resumed_tokens=start.resumed_tokens,
        priority=start.priority,
        traceparent=start.traceparent,
        retention=retention_from_wire(start.retention),
        num_prompt_logprobs=start.num_prompt_logprobs if start.HasField("num_prompt_logprobs") else None,
        speculation=speculation_from_wire(start.speculation),
    )


def update_to_wire(delta: DecodeUpdate) -> decode_service_pb2.SequenceDelta:
    failure = delta.failure
    return decode_service_pb2.SequenceDelta(
        key=key_to_wire(delta.key),
        token_ids=delta.token_ids,
        logprobs=[logprobs_to_wire(position) for position in delta.logprobs],
        prompt=usage_to_wire(delta.prompt) if delta.prompt else None,
        finish_reason=finish_to_wire(delta.finish_reason),
        failure=decode_service_pb2.SequenceFailure(
            code=failure.code, message=failure.message, worker_id=failure.worker_id
        )
        if failure
        else None,
        prompt_logprobs=prompt_logprobs_to_wire(delta.prompt_logprobs) if delta.prompt_logprobs else None,
        drafts=drafts_to_wire(delta.drafts) if delta.drafts.verified else None,
    )


SERVICE_NAME = decode_service_pb2.DESCRIPTOR.services_by_name["DecodeService"].full_name


def install(context: WorkerContext, server: grpc.aio.Server) -> EngineClient[DecodeSequence]:
    """Install the decode role in a worker."""
    quarantine = Quarantine(context.engine.unquarantine)
    context.tasks.create_task(quarantine.run())
    puller = KvPuller(context.transports, context.memory, context.tasks, quarantine)
    prefill_client = PrefillClient(context.channels, context.lease_seconds, context.clock)
    remote_prefill = RemotePrefill(context.engine, prefill_client, puller, context.stats)
    manager = SequenceManager(context, remote_prefill)
    context.tasks.create_task(manager.client.watch())
    decode_service_pb2_grpc.add_DecodeServiceServicer_to_server(DecodeServicer(manager), server)
    return manager.client


DECODE_ROLE = RoleService(WorkerRole.DECODE, SERVICE_NAME, install)
