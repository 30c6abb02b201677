"""GET /weft/fleet/events: the fleet as the scheduler sees it, once a second, and hand-offs as this gateway sees them.

Server-sent events `hello`, `fleet` and `hand_off`; docs/reference/clients.md has their fields. No addresses are told.
"""

from __future__ import annotations

from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from weft.errors import WeftError
from weft_services.gateway.access.visitor import visitor
from weft_services.gateway.error_body import error_fields
from weft_services.gateway.front.exchange import Reply, failures_told, unless_disconnected
from weft_services.gateway.front.operator import is_operator
from weft_services.gateway.mesh.fleet import Subscription
from weft_services.gateway.mesh.pipeline import Pipeline
from weft_services.gateway.mesh.scheduler_types import FleetReport, HandOff, WorkerStatus

News = Subscription[FleetReport | HandOff]


class FleetEvents:
    """As a plain ASGI callable; every picture is put into bytes once, however many listen."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._told: tuple[FleetReport | None, bytes] = (None, b"")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One listener, until it or the gateway goes."""
        reply = Reply(send)
        async with failures_told(reply):
            if scope["method"] == "HEAD":
                await reply.begin_stream(_failure)
                await reply.end_stream(b"")
                return
            with self._pipeline.fleet_events.subscribed() as news:
                await unless_disconnected(receive, self._tell(reply, news, is_operator(scope)))

    async def _tell(self, reply: Reply, news: News, may_operate: bool) -> None:
        await reply.begin_stream(_failure)
        await reply.stream(_event("hello", {"is_operator": may_operate}))
        await reply.stream(self._frame(await self._pipeline.fleet_report()))
        while (item := await news.next()) is not None:
            visitor.get().check_key()
            await reply.stream(self._frame(item))
        await reply.end_stream(b"")

    def _frame(self, item: FleetReport | HandOff) -> bytes:
        if isinstance(item, HandOff):
            fields = {"prefill": item.prefill_id, "decode": item.decode_id, "bytes": item.size_bytes}
            return _event("hand_off", {**fields, "exposed_ms": item.exposed_ms})
        if self._told[0] is not item:
            self._told = item, _event("fleet", self._fleet_fields(item))
        return self._told[1]

    def _fleet_fields(self, fleet: FleetReport) -> dict[str, Any]:
        return {
            "ready": self._pipeline.is_ready,
            "reasons": self._pipeline.reasons,
            "in_flight": self._pipeline.num_in_flight,
            "waiting": fleet.num_waiting,
            "store": fleet.store,
            "workers": [_worker_fields(worker) for worker in fleet.workers],
            "arrivals": fleet.loading,
        }


def _failure(error: WeftError) -> bytes:
    return _event("error", error_fields(error))


def _state(worker: WorkerStatus) -> str:
    if worker.is_parked:
        return "parked"
    if worker.is_draining:
        return "draining"
    return "ready" if worker.is_ready else "full" if worker.is_full else "not ready"


def _worker_fields(worker: WorkerStatus) -> dict[str, Any]:
    work = worker.load
    return {
        "id": worker.address.worker_id,
        "boot": worker.address.boot_id,
        "role": worker.role,
        "can_change_role": worker.can_change_role,
        "model": worker.model,
        "state": _state(worker),
        "transport": worker.transport,
        "blocks": {
            "total": work.num_blocks,
            "active": work.active_blocks,
            "cached": work.cached_blocks,
            "quarantined": work.quarantined_blocks,
            "free": work.free_blocks,
        },
        "running": work.num_running,
        "waiting": work.num_waiting,
        "queued_prefill_tokens": work.queued_prefill_tokens,
        "active_tokens": work.active_tokens,
        "booked_tokens": work.booked_tokens,
        "generated_tokens": work.generated_tokens,
        "computed_prompt_tokens": work.computed_prompt_tokens,
        "report_age_ms": work.report_age_ms,
        "prefix": work.tallies.prefix,
        "hand_offs": work.tallies.transfers,
    }


def _event(name: str, fields: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(fields) + b"\n\n"
