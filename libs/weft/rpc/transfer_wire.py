"""Converts the values of `weft.kv.transfer_protocol` to and from wire messages."""

from __future__ import annotations

from weft.kv.transfer_protocol import (
    Accepted,
    Heartbeat,
    LeaseClosed,
    PrefillEvent,
    PrefillRequest,
    PromptFinished,
    ReadyBlocks,
)
from weft.kv.transport import Endpoint
from weft.rpc.wire import (
    fingerprint_from_wire,
    fingerprint_to_wire,
    key_from_wire,
    key_to_wire,
    logprobs_from_wire,
    logprobs_to_wire,
    retention_from_wire,
    retention_to_wire,
    sampling_from_wire,
    sampling_to_wire,
)
from weft_mesh.v1 import common_pb2, prefill_service_pb2


def prefill_request_to_wire(request: PrefillRequest) -> prefill_service_pb2.PrefillStart:
    return prefill_service_pb2.PrefillStart(
        key=key_to_wire(request.key),
        prefill_boot_id=request.prefill_boot_id,
        fingerprint=fingerprint_to_wire(request.fingerprint),
        token_ids=request.token_ids,
        sampling=sampling_to_wire(request.sampling),
        cache_salt=request.cache_salt,
        held_blocks=request.held_blocks,
        resumed_tokens=request.resumed_tokens,
        priority=request.priority,
        retention=retention_to_wire(request.retention),
        lease_ms=request.lease_ms,
    )


def prefill_request_from_wire(start: prefill_service_pb2.PrefillStart) -> PrefillRequest:
    return PrefillRequest(
        key_from_wire(start.key),
        start.prefill_boot_id,
        fingerprint_from_wire(start.fingerprint),
        tuple(start.token_ids),
        sampling_from_wire(start.sampling),
        start.cache_salt,
        start.held_blocks,
        start.resumed_tokens,
        start.priority,
        retention_from_wire(start.retention),
        start.lease_ms,
    )


def endpoint_to_wire(endpoint: Endpoint) -> common_pb2.TransferEndpoint:
    return common_pb2.TransferEndpoint(
        transport=endpoint.transport,
        segment=endpoint.segment,
        pool_address=endpoint.pool_address,
        file=endpoint.file,
    )


def endpoint_from_wire(endpoint: common_pb2.TransferEndpoint) -> Endpoint:
    return Endpoint(endpoint.transport, endpoint.segment, endpoint.pool_address, endpoint.file)


def event_to_wire(event: PrefillEvent) -> prefill_service_pb2.PrefillResponse:
    match event:
        case Accepted():
            accepted = prefill_service_pb2.PrefillAccepted(
                boot_id=event.boot_id, endpoint=endpoint_to_wire(event.endpoint), lease_ms=event.lease_ms
            )
            return prefill_service_pb2.PrefillResponse(accepted=accepted)
        case ReadyBlocks():
            blocks = prefill_service_pb2.BlocksReady(
                first_index=event.first_index, blocks=event.blocks, checksums=event.checksums, group=event.group
            )
            return prefill_service_pb2.PrefillResponse(blocks=blocks)
        case PromptFinished():
            return prefill_service_pb2.PrefillResponse(finished=_finished_to_wire(event))
        case LeaseClosed():
            closing = prefill_service_pb2.LeaseClosing(lease_held=event.lease_held)
            return prefill_service_pb2.PrefillResponse(closing=closing)
        case Heartbeat():
            return prefill_service_pb2.PrefillResponse(heartbeat=prefill_service_pb2.PrefillHeartbeat())


def event_from_wire(response: prefill_service_pb2.PrefillResponse) -> PrefillEvent:
    """Raises ValueError for an event that is newer than this code."""
    match response.WhichOneof("event"):
        case "accepted":
            accepted = response.accepted
            return Accepted(accepted.boot_id, endpoint_from_wire(accepted.endpoint), accepted.lease_ms)
        case "blocks":
            ready = response.blocks
            return ReadyBlocks(ready.first_index, tuple(ready.blocks), tuple(ready.checksums), ready.group)
        case "finished":
            return _finished_from_wire(response.finished)
        case "closing":
            return LeaseClosed(response.closing.lease_held)
        case "heartbeat":
            return Heartbeat()
        case _:
            raise ValueError("unknown event")


def _finished_to_wire(event: PromptFinished) -> prefill_service_pb2.PrefillFinished:
    return prefill_service_pb2.PrefillFinished(
        first_token_id=event.first_token_id,
        logprobs=logprobs_to_wire(event.logprobs) if event.logprobs else None,
        cached_tokens=event.cached_tokens,
        store_tokens=event.store_tokens,
        queue_ms=event.queue_ms,
        compute_ms=event.compute_ms,
    )


def _finished_from_wire(finished: prefill_service_pb2.PrefillFinished) -> PromptFinished:
    return PromptFinished(
        finished.first_token_id,
        logprobs_from_wire(finished.logprobs) if finished.HasField("logprobs") else None,
        finished.cached_tokens,
        finished.store_tokens,
        finished.queue_ms,
        finished.compute_ms,
    )
