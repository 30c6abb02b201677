"""What an operator may do from the page: take a worker out of service and back, give it a role. And who is one."""

from __future__ import annotations

import ipaddress
from abc import ABC, abstractmethod
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from weft.errors import InvalidRequest, NotFound
from weft.request import WorkerRole
from weft_services.gateway.access.visitor import visitor
from weft_services.gateway.dialects.translation import read_json_object
from weft_services.gateway.error_body import HttpError
from weft_services.gateway.front.exchange import Reply, failures_told, header, read_json_body
from weft_services.gateway.mesh.pipeline import Pipeline

REFUSAL = (
    "this is for operators: by their key, or where neither keys nor WEFT_ALLOW_UNAUTHENTICATED are set "
    "from the gateway's own machine"
)
FORWARDED = (b"forwarded", b"x-forwarded-for", b"x-real-ip", b"via")


def is_operator(scope: Scope) -> bool:
    """By the key, where keys are asked for. Where they are not, whoever sits at this machine, unless callers are sent
    by a proxy: that may sit here too, and need not say whom it speaks for."""
    whose = visitor.get()
    if whose.key is not None:
        return whose.key.operator
    return not whose.is_sent and _is_local(scope)


def _is_local(scope: Scope) -> bool:
    """A caller from loopback who names this machine so, and for whom nobody speaks.

    The name keeps out pages of other sites whose own name was made to lead here; headers of a proxy mean that the
    caller is somebody else.
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


class OperatorEndpoint(ABC):
    """POST /weft/workers/{worker_id}/VERB with a JSON body, which no foreign page can send unasked."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        reply = Reply(send)
        async with failures_told(reply):
            if not is_operator(scope):
                raise HttpError(403, REFUSAL, "forbidden")
            fields = read_json_object(await read_json_body(scope, receive))
            worker_id = str(scope["path_params"]["worker_id"])
            try:
                done = await self._act(worker_id, fields)
            except NotFound as error:
                raise HttpError(404, str(error), "worker_not_found") from error
            await reply.whole(200, orjson.dumps({"worker_id": worker_id, **done}))

    @abstractmethod
    async def _act(self, worker_id: str, fields: dict[str, Any]) -> dict[str, Any]:
        """What is to be told of it. Raises NotFound, WeftError."""


class DrainEndpoint(OperatorEndpoint):
    """VERB is drain or undrain."""

    def __init__(self, pipeline: Pipeline, undo: bool) -> None:
        super().__init__(pipeline)
        self._undo = undo

    async def _act(self, worker_id: str, fields: dict[str, Any]) -> dict[str, Any]:
        await self._pipeline.drain(worker_id, self._undo)
        return {"draining": not self._undo}


class RoleEndpoint(OperatorEndpoint):
    """VERB is role, the body `{"role": "prefill"}`."""

    async def _act(self, worker_id: str, fields: dict[str, Any]) -> dict[str, Any]:
        role = fields.get("role")
        if role not in list(WorkerRole):
            raise InvalidRequest(f"role: expected one of {', '.join(WorkerRole)}", "role")
        await self._pipeline.set_role(worker_id, WorkerRole(role))
        return {"role": role}
