"""Endpoints below `/weft/`: drain workers, change roles, and a stream of fleet events.

The events are `hello`, `fleet` and `hand_off`; docs/reference/clients.md lists their fields.
They never contain addresses.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable
from functools import partial

import orjson
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from weft.errors import InvalidRequest, NotFound, WeftError
from weft.fleet_types import WorkerStatus
from weft.request import WorkerRole
from weft_services.gateway.access.authentication import current_principal
from weft_services.gateway.dialects.chat_translation import Fields, read_json_object
from weft_services.gateway.error_body import HttpError, error_fields
from weft_services.gateway.front.asgi_io import (
    ResponseWriter,
    errors_reported,
    header,
    read_json_body,
    unless_disconnected,
)
from weft_services.gateway.mesh.fleet import HandOff, Subscription
from weft_services.gateway.mesh.pipeline import Pipeline
from weft_services.gateway.mesh.scheduler_client import FleetReport

WORKER = "/weft/workers/{worker_id}"
REFUSAL = (
    "operators only: use an operator's key, or without WEFT_KEYS and WEFT_ALLOW_UNAUTHENTICATED call from the "
    "gateway's machine"
)
FORWARDED = (b"forwarded", b"x-forwarded-for", b"x-real-ip", b"via")
Act = Callable[[str, Fields], Awaitable[Fields]]
News = Subscription[FleetReport | HandOff]


def may_operate(scope: Scope) -> bool:
    """Return whether the caller may operate the mesh.

    With keys, the key decides. Without keys, only callers from this machine may. A proxy excludes that: it may run here
    too and need not name its client.
    """
    principal = current_principal.get()
    if principal.key is not None:
        return principal.key.operator
    return not principal.is_proxied and _is_local(scope)


def _is_local(scope: Scope) -> bool:
    """True for a direct caller from loopback that addresses this machine as localhost.

    The Host check excludes web pages under a foreign name that resolves to this machine. With proxy headers the
    real client may be elsewhere.
    """
    host = header(scope, b"host").rpartition(":")[0] or header(scope, b"host")
    is_forwarded = any(name in FORWARDED for name, _ in scope["headers"])
    return not is_forwarded and _is_loopback((scope.get("client") or ("",))[0]) and _is_loopback(host.strip("[]"))


def _is_loopback(name: str) -> bool:
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class OperatorEndpoint:
    """POST /weft/workers/{worker_id}/VERB with a JSON body, which a foreign page cannot send without a preflight."""

    def __init__(self, act: Act) -> None:
        """`act`: acts on a worker and returns fields of the answer. Raises NotFound, WeftError."""
        self._act = act

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = ResponseWriter(scope, send)
        async with errors_reported(writer):
            if not may_operate(scope):
                raise HttpError(403, REFUSAL, "forbidden")
            fields = read_json_object(await read_json_body(scope, receive))
            worker_id = str(scope["path_params"]["worker_id"])
            try:
                done = await self._act(worker_id, fields)
            except NotFound as error:
                raise HttpError(404, str(error), "worker_not_found") from error
            await writer.send_body(200, orjson.dumps({"worker_id": worker_id, **done}))


def fleet_routes(pipeline: Pipeline) -> list[Route]:
    """Return the routes of all endpoints of this module."""

    async def drain(worker_id: str, fields: Fields, undo: bool) -> Fields:
        await pipeline.scheduler.drain(worker_id, undo)
        return {"draining": not undo}

    async def set_role(worker_id: str, fields: Fields) -> Fields:
        role = fields.get("role")
        if role not in list(WorkerRole):
            raise InvalidRequest(f"role: expected one of {', '.join(WorkerRole)}", "role")
        await pipeline.scheduler.set_role(worker_id, WorkerRole(role))
        return {"role": role}

    verbs: dict[str, Act] = {
        "drain": partial(drain, undo=False),
        "undrain": partial(drain, undo=True),
        "role": set_role,
    }
    return [
        Route("/weft/fleet/events", FleetEvents(pipeline), methods=["GET"]),
        *(
            Route(f"/weft/workers/{{worker_id}}/{verb}", OperatorEndpoint(act), methods=["POST"])
            for verb, act in verbs.items()
        ),
    ]


class FleetEvents:
    """GET /weft/fleet/events. Each fleet report is serialized once for all listeners."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._last_fleet_event: tuple[FleetReport | None, bytes] = (None, b"")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream events until the client or the gateway leaves."""
        writer = ResponseWriter(scope, send)
        async with errors_reported(writer):
            if scope["method"] == "HEAD":
                await writer.begin_stream(_failure)
                await writer.end_stream(b"")
                return
            with self._pipeline.fleet.events.subscribed() as news:
                await unless_disconnected(receive, self._send_events(writer, news, may_operate(scope)))

    async def _send_events(self, writer: ResponseWriter, news: News, can_operate: bool) -> None:
        await writer.begin_stream(_failure)
        await writer.send_frames(_event("hello", {"is_operator": can_operate}))
        await writer.send_frames(self._frame(await self._pipeline.fleet.full_report()))
        while (item := await news.next()) is not None:
            current_principal.get().check_key()
            await writer.send_frames(self._frame(item))
        await writer.end_stream(b"")

    def _frame(self, item: FleetReport | HandOff) -> bytes:
        if isinstance(item, HandOff):
            fields = {"prefill": item.prefill_id, "decode": item.decode_id, "bytes": item.size_bytes}
            return _event("hand_off", {**fields, "exposed_ms": item.exposed_ms})
        if self._last_fleet_event[0] is not item:
            self._last_fleet_event = item, _event("fleet", self._fleet_fields(item))
        return self._last_fleet_event[1]

    def _fleet_fields(self, fleet: FleetReport) -> Fields:
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
    report = worker.report
    if report.is_asleep:
        return "asleep"
    if report.is_draining:
        return "draining"
    return "ready" if report.ready else "full" if report.is_full else "not ready"


def _worker_fields(worker: WorkerStatus) -> Fields:
    hello, report = worker.hello, worker.report
    return {
        "id": worker.address.worker_id,
        "boot": worker.address.boot_id,
        "role": worker.role,
        "can_change_role": hello.can_change_role,
        "model": worker.model,
        "state": _state(worker),
        "transport": hello.transport,
        "layout": hello.layout,
        "blocks": {
            "total": hello.num_blocks,
            "active": report.active_blocks,
            "cached": report.cached_blocks,
            "quarantined": report.quarantined_blocks,
            "free": report.free_blocks,
        },
        "running": report.num_running,
        "waiting": report.num_waiting,
        "queued_prefill_tokens": report.queued_prefill_tokens,
        "active_tokens": report.active_tokens,
        "booked_tokens": worker.booked_prefill_tokens + worker.booked_decode_tokens,
        "generated_tokens": report.generated_tokens,
        "computed_prompt_tokens": report.computed_prompt_tokens,
        "report_age_ms": worker.report_age_ms,
        "prefix": report.stats.prefix,
        "hand_offs": report.stats.transfers,
    }


def _event(name: str, fields: Fields) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(fields) + b"\n\n"
