"""What every HTTP answer has: a request id in the header and in the log. Pure ASGI, around the whole application."""

from __future__ import annotations

import re
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.log import request_id
from weft_services.gateway.front.exchange import header

ACCEPTABLE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}", re.ASCII)


class RequestIds:
    """x-request-id: the client's own where it is harmless, else a new one. Never used inside the mesh."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Wrap one exchange."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = header(scope, b"x-request-id")
        chosen = given if ACCEPTABLE_ID.fullmatch(given) else uuid4().hex
        request_id.set(chosen)
        field = (b"x-request-id", chosen.encode())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), field]
            await send(message)

        await self._app(scope, receive, send_with_id)
