"""Converts shared values to and from wire messages, once at the edge of a process."""

from __future__ import annotations

from collections.abc import Iterable

from weft.fleet_types import NOTHING_LOOKED_UP, EngineTimeStats, PrefixCacheStats, TransferStats, WorkerStats
from weft.request import (
    FinishReason,
    Grammar,
    ModelFingerprint,
    PositionLogprobs,
    PromptLogprobs,
    PromptUsage,
    RequestKey,
    Retention,
    SamplingParams,
    TokenLogprob,
    WorkerAddress,
    WorkerRole,
)
from weft_mesh.v1 import common_pb2, decode_service_pb2, scheduler_service_pb2

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
    return common_pb2.Retention(idle_seconds=retention.idle_seconds, memory_only=retention.memory_only)


def retention_from_wire(retention: common_pb2.Retention) -> Retention:
    return Retention(retention.idle_seconds, retention.memory_only)


def sampling_to_wire(params: SamplingParams) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=params.seed,
        max_tokens=params.max_tokens,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        num_logprobs=params.num_logprobs,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=None if params.repetition_penalty == 1.0 else params.repetition_penalty,
        logit_bias=[common_pb2.TokenBias(token_id=token, bias=bias) for token, bias in params.logit_bias],
        min_tokens=params.min_tokens,
        grammar=_grammar_to_wire(params.grammar),
    )


def sampling_from_wire(params: common_pb2.SamplingParams) -> SamplingParams:
    """Floats come back with float32 precision."""
    return SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=params.seed,
        max_tokens=params.max_tokens,
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        num_logprobs=params.num_logprobs if params.HasField("num_logprobs") else None,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty if params.HasField("repetition_penalty") else 1.0,
        logit_bias=tuple((entry.token_id, entry.bias) for entry in params.logit_bias),
        min_tokens=params.min_tokens,
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
    return common_pb2.ModelFingerprint(
        weights_hash=fingerprint.weights_hash,
        kv_dtype=fingerprint.kv_dtype,
        block_tokens=fingerprint.block_tokens,
        block_bytes=fingerprint.block_bytes,
        layout=fingerprint.layout,
    )


def fingerprint_from_wire(fingerprint: common_pb2.ModelFingerprint) -> ModelFingerprint:
    return ModelFingerprint(
        fingerprint.weights_hash,
        fingerprint.kv_dtype,
        fingerprint.block_tokens,
        fingerprint.block_bytes,
        fingerprint.layout,
    )


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
    return decode_service_pb2.PromptUsage(
        cached_tokens=usage.cached_tokens,
        store_tokens=usage.store_tokens,
        transferred_bytes=usage.transferred_bytes,
        queue_ms=usage.queue_ms,
        compute_ms=usage.compute_ms,
        exposed_transfer_ms=usage.exposed_transfer_ms,
        prefill_worker_id=usage.prefill_worker_id,
        failed_worker_id=usage.failed_worker_id,
        routed_us=usage.routed_us,
        reserved_us=usage.reserved_us,
        prefilling_us=usage.prefilling_us,
        transferring_us=usage.transferring_us,
    )


def usage_from_wire(usage: decode_service_pb2.PromptUsage) -> PromptUsage:
    return PromptUsage(
        usage.cached_tokens,
        usage.store_tokens,
        usage.transferred_bytes,
        usage.queue_ms,
        usage.compute_ms,
        usage.exposed_transfer_ms,
        usage.prefill_worker_id,
        usage.failed_worker_id,
        usage.routed_us,
        usage.reserved_us,
        usage.prefilling_us,
        usage.transferring_us,
    )


def prefix_stats_to_wire(prefix: PrefixCacheStats) -> scheduler_service_pb2.PrefixTally | None:
    """Return None if nothing was looked up."""
    if prefix == NOTHING_LOOKED_UP:
        return None
    return scheduler_service_pb2.PrefixTally(
        looked_up_tokens=prefix.looked_up_tokens,
        pool_tokens=prefix.pool_tokens,
        dram_tokens=prefix.dram_tokens,
        nvme_tokens=prefix.nvme_tokens,
        dram_seconds=prefix.dram_seconds,
        nvme_seconds=prefix.nvme_seconds,
    )


def transfer_stats_to_wire(transfers: Iterable[TransferStats]) -> list[scheduler_service_pb2.HandOffTally]:
    return [
        scheduler_service_pb2.HandOffTally(
            prefill_worker_id=stats.prefill_worker_id,
            num_prompts=stats.num_prompts,
            size_bytes=stats.size_bytes,
            num_failed=stats.num_failed,
        )
        for stats in transfers
    ]


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
        EngineTimeStats(report.generating_steps, report.generating_seconds, report.computing_seconds),
    )
