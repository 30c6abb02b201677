"""What goes wrong is told, and nothing of the request stays for the garbage collector."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from weft.errors import NotFound
from weft_services.gateway.front.exchange import Reply, failures_told
from weft_services.gateway.front.service import accounted


class Body:
    """What a request holds."""


async def over_http(held: list[weakref.ref[Body]]) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async with failures_told(Reply(send)):
        fail(held)
    assert [message.get("status") for message in sent] == [404, None]


async def over_grpc(held: list[weakref.ref[Body]]) -> None:
    with pytest.raises(NotFound), accounted("Chat", ()):
        fail(held)


def fail(held: list[weakref.ref[Body]]) -> None:
    body = Body()
    held.append(weakref.ref(body))
    raise NotFound("no such model")


@pytest.mark.parametrize("way", [over_http, over_grpc])
async def test_a_request_that_failed_is_let_go_at_once(way: Any) -> None:
    held: list[weakref.ref[Body]] = []
    gc.collect()
    gc.disable()
    try:
        await way(held)
        assert held[0]() is None
    finally:
        gc.enable()
