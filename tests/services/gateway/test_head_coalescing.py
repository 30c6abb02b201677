"""The head of a response leaves with the first body bytes; a head alone leaves in the next loop iteration."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from weft_services.gateway.front.asgi_io import unless_disconnected
from weft_services.gateway.front.http_server import HeadCoalescingTransport


class Wire:
    """A transport that remembers its calls."""

    def __init__(self) -> None:
        self.calls: list[bytes] = []
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.calls.append(data)

    def writelines(self, parts: tuple[bytes, ...]) -> None:
        self.calls.append(b"".join(parts))

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed


def corked(is_started: bool = True) -> tuple[Any, Wire, HeadCoalescingTransport]:
    wire = Wire()
    cycle: Any = SimpleNamespace(transport=wire, response_started=is_started)
    return cycle, wire, HeadCoalescingTransport(cycle, asyncio.get_running_loop())


async def test_head_and_body_are_one_call_and_the_rest_of_a_stream_is_written_at_once() -> None:
    _, wire, cork = corked()
    cork.write(b"head ")
    assert wire.calls == []
    cork.write(b"first")
    cork.write(b"second")
    assert wire.calls == [b"head first", b"second"]
    await asyncio.sleep(0)
    assert wire.calls == [b"head first", b"second"]


async def test_a_head_that_nothing_follows_leaves_with_the_turn_of_the_loop() -> None:
    _, wire, cork = corked()
    cork.write(b"head")
    await asyncio.sleep(0)
    assert wire.calls == [b"head"]
    cork.write(b"body")
    assert wire.calls == [b"head", b"body"]


async def test_a_word_before_the_head_waits_for_nothing() -> None:
    cycle, wire, cork = corked(is_started=False)
    cork.write(b"100")
    assert wire.calls == [b"100"]
    cycle.response_started = True
    cork.write(b"head ")
    cork.write(b"body")
    assert wire.calls == [b"100", b"head body"]


async def test_what_is_closed_has_said_what_it_had_to() -> None:
    _, wire, cork = corked()
    cork.write(b"head")
    assert not cork.is_closing()
    cork.close()
    assert (wire.calls, cork.is_closing()) == ([b"head"], True)


async def test_a_client_that_leaves_ends_the_work_and_nothing_else() -> None:
    ended: list[str] = []

    async def leaves() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def works() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("work")
            raise

    async with asyncio.timeout(10):
        await unless_disconnected(leaves, works())
        await asyncio.sleep(0)  # the task itself goes on
    assert ended == ["work"]


async def test_a_cancellation_from_elsewhere_and_an_error_of_the_work_go_on() -> None:
    async def stays() -> dict[str, str]:
        await asyncio.Event().wait()
        raise AssertionError("it is cancelled before")

    async def fails() -> None:
        raise ValueError("the work's own")

    with pytest.raises(ValueError, match="the work's own"):
        await unless_disconnected(stays, fails())
    task = asyncio.create_task(unless_disconnected(stays, asyncio.sleep(60)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
