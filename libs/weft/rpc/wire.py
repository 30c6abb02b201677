"""Converts shared values to and from wire messages, once at the edge of a process.

Most fields have the same name and type on both sides: a new one of those needs no change here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from weft.fleet_types import NOTHING_LOOKED_UP, EngineTimeStats, PrefixCacheStats, TransferStats, WorkerStats
from weft.kv.transfer import (
    Accepted,
    Endpoint,
    Heartbeat,
    LeaseClosed,
    PrefillEvent,
    PrefillRequest,
    PromptFinished,
    ReadyBlocks,
)
from weft.request import (
    SPECULATE,
    DraftCounts,
    FinishReason,
    Grammar,
    ModelFingerprint,
    PositionLogprobs,
    PromptLogprobs,
    PromptUsage,
    RequestKey,
    Retention,
    SamplingParams,
    Speculation,
    TokenLogprob,
    WorkerAddress,
    WorkerRole,
)
from weft_mesh.v1 import common_pb2, decode_service_pb2, prefill_service_pb2, scheduler_service_pb2

_FINISH_TO_WIRE = {
    None: common_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.TOOL_CALLS: common_pb2.FINISH_REASON_TOOL_CALLS,
}
_FINISH_FROM_WIRE = {wire: reason for reason, wire in _FINISH_TO_WIRE.items()}
_ROLE_TO_WIRE = {
    WorkerRole.PREFILL: common_pb2.WORKER_ROLE_PREFILL,
    WorkerRole.DECODE: common_pb2.WORKER_ROLE_DECODE,
    WorkerRole.BOTH: common_pb2.WORKER_ROLE_BOTH,
}
_ROLE_FROM_WIRE = {wire: role for role, wire in _ROLE_TO_WIRE.items()}


def shared_fields(kind: type[Any], *converted: str) -> tuple[str, ...]:
    """Return the fields of a dataclass that its message has with equal names and types; `converted` are the others."""
    return tuple(field.name for field in fields(kind) if field.name not in converted)


def shared_values(source: object, names: Iterable[str]) -> dict[str, Any]:
    """Return these fields of a value or a message as keyword arguments for the other."""
    return {name: getattr(source, name) for name in names}


_RETENTION, _FINGERPRINT, _USAGE = shared_fields(Retention), shared_fields(ModelFingerprint), shared_fields(PromptUsage)
_SAMPLING = shared_fields(
    SamplingParams, "stop_token_ids", "num_logprobs", "repetition_penalty", "logit_bias", "grammar"
)
ENGINE_TIME = shared_fields(EngineTimeStats)
_PREFIX_STATS, _TRANSFER_STATS = shared_fields(PrefixCacheStats), shared_fields(TransferStats)
_PREFILL_REQUEST = shared_fields(PrefillRequest, "key", "fingerprint", "token_ids", "sampling", "retention")
_DRAFTS = shared_fields(DraftCounts)
_ENDPOINT, _FINISHED = shared_fields(Endpoint), shared_fields(PromptFinished, "logprobs")


def finish_to_wire(reason: FinishReason | None) -> common_pb2.FinishReason.ValueType:
    """None, a sequence that continues, becomes UNSPECIFIED."""
    return _FINISH_TO_WIRE[reason]


def finish_from_wire(reason: common_pb2.FinishReason.ValueType) -> FinishReason | None:
    """UNSPECIFIED and values newer than this code become None."""
    return _FINISH_FROM_WIRE.get(reason)


def role_to_wire(role: WorkerRole) -> common_pb2.WorkerRole.ValueType:
    return _ROLE_TO_WIRE[role]


def role_from_wire(role: common_pb2.WorkerRole.ValueType) -> WorkerRole:
    """Convert a role. Raises KeyError for UNSPECIFIED."""
    return _ROLE_FROM_WIRE[role]


def key_to_wire(key: RequestKey) -> common_pb2.RequestKey:
    return common_pb2.RequestKey(request_id=key.request_id, generation=key.generation)


def key_from_wire(key: common_pb2.RequestKey) -> RequestKey:
    return RequestKey(key.request_id, key.generation)


def retention_to_wire(retention: Retention) -> common_pb2.Retention:
    return common_pb2.Retention(**shared_values(retention, _RETENTION))


def retention_from_wire(retention: common_pb2.Retention) -> Retention:
    return Retention(**shared_values(retention, _RETENTION))


def speculation_to_wire(speculation: Speculation) -> decode_service_pb2.Speculation | None:
    """Return None for the default, so that most requests carry nothing."""
    if speculation == SPECULATE:
        return None
    return decode_service_pb2.Speculation(is_disabled=not speculation.is_enabled, prediction=speculation.prediction)


def speculation_from_wire(speculation: decode_service_pb2.Speculation) -> Speculation:
    return Speculation(not speculation.is_disabled, tuple(speculation.prediction))


def drafts_to_wire(drafts: DraftCounts) -> decode_service_pb2.DraftCounts:
    return decode_service_pb2.DraftCounts(**shared_values(drafts, _DRAFTS))


def drafts_from_wire(drafts: decode_service_pb2.DraftCounts) -> DraftCounts:
    return DraftCounts(**shared_values(drafts, _DRAFTS))


def sampling_to_wire(params: SamplingParams) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(
        **shared_values(params, _SAMPLING),
        stop_token_ids=params.stop_token_ids,
        num_logprobs=params.num_logprobs,
        repetition_penalty=None if params.repetition_penalty == 1.0 else params.repetition_penalty,
        logit_bias=[common_pb2.TokenBias(token_id=token, bias=bias) for token, bias in params.logit_bias],
        grammar=_grammar_to_wire(params.grammar),
    )


def sampling_from_wire(params: common_pb2.SamplingParams) -> SamplingParams:
    """Floats come back with float32 precision."""
    return SamplingParams(
        **shared_values(params, _SAMPLING),
        stop_token_ids=tuple(params.stop_token_ids),
        num_logprobs=params.num_logprobs if params.HasField("num_logprobs") else None,
        repetition_penalty=params.repetition_penalty if params.HasField("repetition_penalty") else 1.0,
        logit_bias=tuple((entry.token_id, entry.bias) for entry in params.logit_bias),
        grammar=Grammar(params.grammar.text, params.grammar.tokenizer_hash) if params.HasField("grammar") else None,
    )


def _grammar_to_wire(grammar: Grammar | None) -> common_pb2.Grammar | None:
    if grammar is None:
        return None
    return common_pb2.Grammar(text=grammar.text, tokenizer_hash=grammar.tokenizer_hash)


def _logprob_to_wire(entry: TokenLogprob) -> common_pb2.TokenLogprob:
    return common_pb2.TokenLogprob(token_id=entry.token_id, logprob=entry.logprob)


def _logprob_from_wire(entry: common_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(entry.token_id, entry.logprob)


def logprobs_to_wire(position: PositionLogprobs) -> common_pb2.PositionLogprobs:
    top = [_logprob_to_wire(entry) for entry in position.top]
    return common_pb2.PositionLogprobs(chosen=_logprob_to_wire(position.chosen), top=top)


def logprobs_from_wire(position: common_pb2.PositionLogprobs) -> PositionLogprobs:
    top = tuple(_logprob_from_wire(entry) for entry in position.top)
    return PositionLogprobs(_logprob_from_wire(position.chosen), top)


def prompt_logprobs_to_wire(piece: PromptLogprobs) -> decode_service_pb2.PromptLogprobs:
    return decode_service_pb2.PromptLogprobs(
        start=piece.start,
        chosen=piece.chosen,
        ranks=piece.ranks,
        num_top=piece.num_top,
        top_ids=piece.top_ids,
        top=piece.top,
    )


def prompt_logprobs_from_wire(piece: decode_service_pb2.PromptLogprobs) -> PromptLogprobs:
    top_ids, top = tuple(piece.top_ids), tuple(piece.top)
    return PromptLogprobs(piece.start, tuple(piece.chosen), tuple(piece.ranks), top_ids, top, piece.num_top)


def fingerprint_to_wire(fingerprint: ModelFingerprint) -> common_pb2.ModelFingerprint:
    return common_pb2.ModelFingerprint(**shared_values(fingerprint, _FINGERPRINT))


def fingerprint_from_wire(fingerprint: common_pb2.ModelFingerprint) -> ModelFingerprint:
    return ModelFingerprint(**shared_values(fingerprint, _FINGERPRINT))


def address_to_wire(worker: WorkerAddress) -> scheduler_service_pb2.WorkerAddress:
    message = scheduler_service_pb2.WorkerAddress()
    address_into_wire(worker, message)
    return message


def address_into_wire(worker: WorkerAddress, message: scheduler_service_pb2.WorkerAddress) -> None:
    """Fill the address field of a larger message in place."""
    message.worker_id, message.boot_id, message.address = worker.worker_id, worker.boot_id, worker.address


def address_from_wire(worker: scheduler_service_pb2.WorkerAddress) -> WorkerAddress:
    return WorkerAddress(worker.worker_id, worker.boot_id, worker.address)


def usage_to_wire(usage: PromptUsage) -> decode_service_pb2.PromptUsage:
    return decode_service_pb2.PromptUsage(**shared_values(usage, _USAGE))


def usage_from_wire(usage: decode_service_pb2.PromptUsage) -> PromptUsage:
    return PromptUsage(**shared_values(usage, _USAGE))


def prefix_stats_to_wire(prefix: PrefixCacheStats) -> scheduler_service_pb2.PrefixTally | None:
    """Return None if nothing was looked up."""
    if prefix == NOTHING_LOOKED_UP:
        return None
    return scheduler_service_pb2.PrefixTally(**shared_values(prefix, _PREFIX_STATS))


def transfer_stats_to_wire(transfers: Iterable[TransferStats]) -> list[scheduler_service_pb2.HandOffTally]:
    return [scheduler_service_pb2.HandOffTally(**shared_values(stats, _TRANSFER_STATS)) for stats in transfers]


def worker_stats_from_wire(report: scheduler_service_pb2.WorkerReport, with_hand_offs: bool = True) -> WorkerStats:
    """Convert a report. Transfers, one for each pair of workers, take longer than everything else."""
    prefix = report.prefix
    return WorkerStats(
        PrefixCacheStats(
            prefix.looked_up_tokens,
            prefix.pool_tokens,
            prefix.dram_tokens,
            prefix.nvme_tokens,
            prefix.dram_seconds,
            prefix.nvme_seconds,
        ),
        tuple(
            TransferStats(stats.prefill_worker_id, stats.num_prompts, stats.size_bytes, stats.num_failed)
            for stats in (report.hand_offs if with_hand_offs else ())
        ),
        EngineTimeStats(**shared_values(report, ENGINE_TIME)),
    )


def prefill_request_to_wire(request: PrefillRequest) -> prefill_service_pb2.PrefillStart:
    return prefill_service_pb2.PrefillStart(
        **shared_values(request, _PREFILL_REQUEST),
        key=key_to_wire(request.key),
        fingerprint=fingerprint_to_wire(request.fingerprint),
        token_ids=request.token_ids,
        sampling=sampling_to_wire(request.sampling),
        retention=retention_to_wire(request.retention),
    )


def prefill_request_from_wire(start: prefill_service_pb2.PrefillStart) -> PrefillRequest:
    return PrefillRequest(
        **shared_values(start, _PREFILL_REQUEST),
        key=key_from_wire(start.key),
        fingerprint=fingerprint_from_wire(start.fingerprint),
        token_ids=tuple(start.token_ids),
        sampling=sampling_from_wire(start.sampling),
        retention=retention_from_wire(start.retention),
    )


def endpoint_to_wire(endpoint: Endpoint) -> common_pb2.TransferEndpoint:
    return common_pb2.TransferEndpoint(**shared_values(endpoint, _ENDPOINT))


def endpoint_from_wire(endpoint: common_pb2.TransferEndpoint) -> Endpoint:
    return Endpoint(**shared_values(endpoint, _ENDPOINT))


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
    logprobs = logprobs_to_wire(event.logprobs) if event.logprobs else None
    return prefill_service_pb2.PrefillFinished(**shared_values(event, _FINISHED), logprobs=logprobs)


def _finished_from_wire(finished: prefill_service_pb2.PrefillFinished) -> PromptFinished:
    logprobs = logprobs_from_wire(finished.logprobs) if finished.HasField("logprobs") else None
    return PromptFinished(**shared_values(finished, _FINISHED), logprobs=logprobs)
