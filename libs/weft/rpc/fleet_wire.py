"""Conversion of `weft.fleet_types` to and from wire messages. Bounds are the servicer's task."""

from __future__ import annotations

from weft import trace
from weft.fleet_types import LoadingWorker, Priority, RouteQuery, StoreUsage, WorkerHello, WorkerReport, WorkerStatus
from weft.rpc.wire import (
    ENGINE_TIME,
    address_from_wire,
    address_to_wire,
    fingerprint_from_wire,
    fingerprint_to_wire,
    key_to_wire,
    prefix_stats_to_wire,
    role_from_wire,
    role_to_wire,
    shared_fields,
    shared_values,
    worker_stats_from_wire,
)
from weft_mesh.v1 import common_pb2
from weft_mesh.v1 import scheduler_service_pb2 as pb

_PRIORITY_TO_WIRE = {
    Priority.INTERACTIVE: pb.PRIORITY_INTERACTIVE,
    Priority.DEFAULT: pb.PRIORITY_DEFAULT,
    Priority.BATCH: pb.PRIORITY_BATCH,
}
_HELLO = shared_fields(WorkerHello, "address", "role", "fingerprint", "is_draining")
_STATUS, _LOADING = shared_fields(WorkerStatus, "hello", "report"), shared_fields(LoadingWorker, "role")
_STORE_USAGE = shared_fields(StoreUsage)
_PRIORITY_FROM_WIRE = {wire: priority for priority, wire in _PRIORITY_TO_WIRE.items()}


def priority_from_wire(priority: pb.Priority.ValueType) -> Priority:
    """UNSPECIFIED and values newer than this code are DEFAULT."""
    return _PRIORITY_FROM_WIRE.get(priority, Priority.DEFAULT)


def hello_to_wire(hello: WorkerHello) -> pb.WorkerHello:
    return pb.WorkerHello(
        **shared_values(hello, _HELLO),
        worker=address_to_wire(hello.address),
        role=role_to_wire(hello.role),
        fingerprint=fingerprint_to_wire(hello.fingerprint),
    )


def hello_from_wire(hello: pb.WorkerHello) -> WorkerHello:
    """Raises KeyError for a role that is unspecified or unknown."""
    return WorkerHello(
        **shared_values(hello, _HELLO),
        address=address_from_wire(hello.worker),
        role=role_from_wire(hello.role),
        fingerprint=fingerprint_from_wire(hello.fingerprint),
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
        **shared_values(report.stats.engine_time, ENGINE_TIME),
        draining=report.is_draining,
        asleep=report.is_asleep,
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
        is_asleep=report.asleep,
        full=report.full if report.HasField("full") else None,
        stats=worker_stats_from_wire(report, with_hand_offs),
        hand_offs=report.hand_offs,
        role=role_from_wire(report.role) if report.role != common_pb2.WORKER_ROLE_UNSPECIFIED else None,
    )


def status_to_wire(status: WorkerStatus) -> pb.WorkerStatus:
    return pb.WorkerStatus(
        **shared_values(status, _STATUS), hello=hello_to_wire(status.hello), report=report_to_wire(status.report)
    )


def status_from_wire(status: pb.WorkerStatus) -> WorkerStatus:
    """Convert one line of the worker list, hand-off counters included."""
    report = report_from_wire(status.report, with_hand_offs=True)
    return WorkerStatus(**shared_values(status, _STATUS), hello=hello_from_wire(status.hello), report=report)


def loading_to_wire(worker: LoadingWorker) -> pb.WorkerArrival:
    return pb.WorkerArrival(**shared_values(worker, _LOADING), role=role_to_wire(worker.role))


def loading_from_wire(arrival: pb.WorkerArrival) -> LoadingWorker:
    """Raises KeyError for a role that is unspecified or unknown."""
    return LoadingWorker(**shared_values(arrival, _LOADING), role=role_from_wire(arrival.role))


def usage_to_wire(usage: StoreUsage) -> pb.StoreStatus:
    return pb.StoreStatus(**shared_values(usage, _STORE_USAGE))


def usage_from_wire(usage: pb.StoreStatus) -> StoreUsage:
    return StoreUsage(**shared_values(usage, _STORE_USAGE))


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
        sampling_version=query.sampling_version,
    )
