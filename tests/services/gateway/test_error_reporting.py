"""Errors are reported to the client, and no traceback keeps the request alive."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from weft.errors import ModelLoading, NotFound
from weft_services.gateway.error_body import error_fields, retry_after_headers, status_of
from weft_services.gateway.front.asgi_io import ResponseWriter, errors_reported
from weft_services.gateway.front.grpc_service import recorded


class Body:
    """What a request holds."""


def test_that_a_model_is_being_loaded_is_told_and_not_by_whom() -> None:
    error = ModelLoading("no worker of 'm' is live; decode-7 at 10.0.0.7 loads it")
    told = error_fields(error)
    assert told["code"] == "model_loading"
    assert "being loaded" in told["message"]
    assert "decode-7" not in told["message"]
    assert status_of(error) == 503
    assert dict(retry_after_headers(error))[b"retry-after"] == b"1"


async def over_http(held: list[weakref.ref[Body]]) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async with errors_reported(ResponseWriter({"path": "/v1/chat/completions", "headers": []}, send)):
        fail(held)
    assert [message.get("status") for message in sent] == [404, None]


async def over_grpc(held: list[weakref.ref[Body]]) -> None:
    with pytest.raises(NotFound), recorded("Chat", ()):
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
