"""Conversion of `weft.fleet_types` to and from wire messages. Bounds are the servicer's task."""

from __future__ import annotations

from weft import trace
from weft.fleet_types import LoadingWorker, Priority, RouteQuery, StoreUsage, WorkerHello, WorkerReport, WorkerStatus
from weft.rpc.wire import (
    address_from_wire,
    address_to_wire,
    fingerprint_from_wire,
    fingerprint_to_wire,
    key_to_wire,
    prefix_stats_to_wire,
    role_from_wire,
    role_to_wire,
    worker_stats_from_wire,
)
from weft_mesh.v1 import common_pb2
from weft_mesh.v1 import scheduler_service_pb2 as pb

_PRIORITY_TO_WIRE = {
    Priority.INTERACTIVE: pb.PRIORITY_INTERACTIVE,
    Priority.DEFAULT: pb.PRIORITY_DEFAULT,
    Priority.BATCH: pb.PRIORITY_BATCH,
}
_PRIORITY_FROM_WIRE = {wire: priority for priority, wire in _PRIORITY_TO_WIRE.items()}


def priority_from_wire(priority: pb.Priority.ValueType) -> Priority:
    """UNSPECIFIED and values newer than this code are DEFAULT."""
    return _PRIORITY_FROM_WIRE.get(priority, Priority.DEFAULT)


def hello_to_wire(hello: WorkerHello) -> pb.WorkerHello:
    return pb.WorkerHello(
        worker=address_to_wire(hello.address),
        role=role_to_wire(hello.role),
        model=hello.model,
        fingerprint=fingerprint_to_wire(hello.fingerprint),
        num_blocks=hello.num_blocks,
        max_context_tokens=hello.max_context_tokens,
        transport=hello.transport,
        metrics_address=hello.metrics_address,
        can_change_role=hello.can_change_role,
    )


def hello_from_wire(hello: pb.WorkerHello) -> WorkerHello:
    """Raises KeyError for a role that is unspecified or unknown."""
    return WorkerHello(
        address=address_from_wire(hello.worker),
        role=role_from_wire(hello.role),
        model=hello.model,
        fingerprint=fingerprint_from_wire(hello.fingerprint),
        num_blocks=hello.num_blocks,
        max_context_tokens=hello.max_context_tokens,
        transport=hello.transport,
        metrics_address=hello.metrics_address,
        can_change_role=hello.can_change_role,
    )


def report_to_wire(report: WorkerReport) -> pb.WorkerReport:
    return pb.WorkerReport(
        num_running=report.num_running,
        num_waiting=report.num_waiting,
        queued_prefill_tokens=report.queued_prefill_tokens,
        active_tokens=report.active_tokens,
        free_blocks=report.free_blocks,
        cached_blocks=report.cached_blocks,
        active_blocks=report.active_blocks,
        quarantined_blocks=report.quarantined_blocks,
        ready=report.ready,
        generated_tokens=report.generated_tokens,
        computed_prompt_tokens=report.computed_prompt_tokens,
        generating_steps=report.stats.engine_time.generating_steps,
        generating_seconds=report.stats.engine_time.generating_seconds,
        computing_seconds=report.stats.engine_time.computing_seconds,
        draining=report.is_draining,
        parked=report.is_parked,
        full=report.full,
        prefix=prefix_stats_to_wire(report.stats.prefix),
        hand_offs=report.hand_offs,
        role=role_to_wire(report.role) if report.role else common_pb2.WORKER_ROLE_UNSPECIFIED,
    )


def report_from_wire(report: pb.WorkerReport, with_hand_offs: bool = False) -> WorkerReport:
    """Convert a report. `with_hand_offs`: also fill `stats.transfers`, which takes longer than all other fields.

    Raises KeyError for a role that is newer than this code.
    """
    return WorkerReport(
        num_running=report.num_running,
        num_waiting=report.num_waiting,
        queued_prefill_tokens=report.queued_prefill_tokens,
        active_tokens=report.active_tokens,
        free_blocks=report.free_blocks,
        cached_blocks=report.cached_blocks,
        active_blocks=report.active_blocks,
        quarantined_blocks=report.quarantined_blocks,
        ready=report.ready,
        generated_tokens=report.generated_tokens,
        computed_prompt_tokens=report.computed_prompt_tokens,
        is_draining=report.draining,
        is_parked=report.parked,
        full=report.full if report.HasField("full") else None,
        stats=worker_stats_from_wire(report, with_hand_offs),
        hand_offs=report.hand_offs,
        role=role_from_wire(report.role) if report.role != common_pb2.WORKER_ROLE_UNSPECIFIED else None,
    )


def status_to_wire(status: WorkerStatus) -> pb.WorkerStatus:
    return pb.WorkerStatus(
        hello=hello_to_wire(status.hello),
        report=report_to_wire(status.report),
        booked_prefill_tokens=status.booked_prefill_tokens,
        booked_decode_tokens=status.booked_decode_tokens,
        booked_requests=status.booked_requests,
        report_age_ms=status.report_age_ms,
    )


def status_from_wire(status: pb.WorkerStatus) -> WorkerStatus:
    """Convert one line of the worker list, hand-off counters included."""
    return WorkerStatus(
        hello=hello_from_wire(status.hello),
        report=report_from_wire(status.report, with_hand_offs=True),
        booked_prefill_tokens=status.booked_prefill_tokens,
        booked_decode_tokens=status.booked_decode_tokens,
        booked_requests=status.booked_requests,
        report_age_ms=status.report_age_ms,
    )


def loading_to_wire(worker: LoadingWorker) -> pb.WorkerArrival:
    return pb.WorkerArrival(
        worker_id=worker.worker_id,
        role=role_to_wire(worker.role),
        model=worker.model,
        phase=worker.phase,
        done_bytes=worker.done_bytes,
        total_bytes=worker.total_bytes,
        since_ms=worker.since_ms,
    )


def loading_from_wire(arrival: pb.WorkerArrival) -> LoadingWorker:
    """Raises KeyError for a role that is unspecified or unknown."""
    return LoadingWorker(
        worker_id=arrival.worker_id,
        role=role_from_wire(arrival.role),
        model=arrival.model,
        phase=arrival.phase,
        done_bytes=arrival.done_bytes,
        total_bytes=arrival.total_bytes,
        since_ms=arrival.since_ms,
    )


def usage_to_wire(usage: StoreUsage) -> pb.StoreStatus:
    return pb.StoreStatus(
        memory_bytes=usage.memory_bytes,
        memory_used_bytes=usage.memory_used_bytes,
        disk_bytes=usage.disk_bytes,
        disk_used_bytes=usage.disk_used_bytes,
    )


def usage_from_wire(usage: pb.StoreStatus) -> StoreUsage:
    return StoreUsage(usage.memory_bytes, usage.memory_used_bytes, usage.disk_bytes, usage.disk_used_bytes)


def query_to_wire(query: RouteQuery, remaining_seconds: float) -> pb.RouteRequest:
    """Build the request of one attempt, with the current trace context; the deadline is at least 1 ms away."""
    return pb.RouteRequest(
        key=key_to_wire(query.key),
        model=query.model,
        prompt_tokens=query.prompt_tokens,
        max_tokens=query.max_tokens,
        session=query.session,
        block_keys=query.block_keys,
        excluded_boot_ids=query.excluded_boot_ids,
        remaining_ms=max(1, int(remaining_seconds * 1000)),
        priority=_PRIORITY_TO_WIRE[query.priority],
        tenant=query.tenant,
        reject_if_busy=query.reject_if_busy,
        traceparent=trace.traceparent(),
        resumed_tokens=query.resumed_tokens,
        computes_prompt=query.computes_prompt,
    )
