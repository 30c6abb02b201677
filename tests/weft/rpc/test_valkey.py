"""Turns and rests, without a server: what is asked is ours, and says how the server would have fared."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from redis.exceptions import ConnectionError as Refused
from redis.exceptions import TimeoutError as LateError

from weft.errors import ConfigError
from weft.rpc.valkey import MAX_CONNECTIONS, MAX_LATE, Valkey

URL = "redis://127.0.0.1:1/0"


@pytest.mark.parametrize(
    "url",
    [
        "redis://me:secret@valkey:port/0",
        "redis://me:secret@valkey..internal:6379/0",
        "valkey://me:secret@valkey:6379/0",
        "redis://:secret/of@valkey:6379/0",
        "valkey:6379?password=secret",
        "valkey:6379",
    ],
)
def test_an_address_that_is_none_is_refused_by_its_variable_and_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match=r"WEFT_REDIS_URL: valkey\S* is not a Valkey URL") as refused:
        Valkey(url, "found", "lost")
    assert "secret" not in str(refused.value)
    assert refused.value.__suppress_context__


@pytest.mark.parametrize("url", ["redis://[::1]:6379", "unix:///run/valkey.sock?db=1", "rediss://me:p%40@valkey/0"])
async def test_an_address_may_be_written_in_every_way_that_clients_know(url: str) -> None:
    await Valkey(url, "found", "lost").close()


async def test_a_task_that_asks_can_be_cancelled_at_any_moment() -> None:
    """redis-py swallows a cancellation just after it has written a command."""
    valkey = Valkey(URL, "found", "lost")
    is_written = asyncio.Event()

    async def command(_: Any) -> int:
        is_written.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return 1

    asking = asyncio.create_task(valkey.call(command))
    await is_written.wait()
    asking.cancel()
    await asyncio.wait({asking})
    assert asking.cancelled()


async def test_what_is_asked_at_once_never_waits_for_a_connection_within_its_deadline() -> None:
    valkey = Valkey(URL, "found", "lost", deadline_seconds=20, at_once=10 * MAX_CONNECTIONS)
    num_asked = num_most = 0
    all_asked, are_many = asyncio.Event(), asyncio.Event()

    async def command(_: Any) -> int:
        nonlocal num_asked, num_most
        num_asked += 1
        num_most = max(num_most, num_asked)
        if num_asked == MAX_CONNECTIONS:
            are_many.set()
        await all_asked.wait()
        num_asked -= 1
        return 1

    answers = [asyncio.create_task(valkey.call(command)) for _ in range(3 * MAX_CONNECTIONS)]
    await are_many.wait()
    all_asked.set()
    assert await asyncio.gather(*answers) == [1] * len(answers)
    assert num_most == MAX_CONNECTIONS
    await valkey.close()


async def test_a_turn_that_does_not_come_is_no_failure_of_the_server() -> None:
    valkey = Valkey(URL, "found", "lost", deadline_seconds=20, turn_seconds=0.01, at_once=1)
    go_on = asyncio.Event()

    async def long(_: Any) -> bool:
        return await go_on.wait()

    async def short(_: Any) -> bool:
        return True

    first = asyncio.create_task(valkey.call(long))
    await asyncio.sleep(0)
    assert await valkey.call(short) is None
    assert not valkey.is_backing_off
    go_on.set()
    assert await first is True
    assert await valkey.call(short) is True
    await valkey.close()


@pytest.mark.parametrize(
    ("error", "num_heard"), [(Refused("no"), 1), (TimeoutError(), MAX_LATE)], ids=["refused", "late"]
)
async def test_whoever_waited_while_it_failed_does_not_ask(error: Exception, num_heard: int) -> None:
    valkey = Valkey(URL, "found", "lost", deadline_seconds=20, at_once=1)
    go_on, num_asked = asyncio.Event(), 0

    async def failing(_: Any) -> bool:
        nonlocal num_asked
        num_asked += 1
        await go_on.wait()
        raise error

    asked = [asyncio.create_task(valkey.call(failing)) for _ in range(5)]
    await asyncio.sleep(0)
    go_on.set()
    assert await asyncio.gather(*asked) == [None] * 5
    assert num_asked == num_heard
    assert valkey.is_backing_off
    await valkey.close()


@pytest.mark.parametrize("late", [TimeoutError(), LateError("read")])
async def test_a_late_answer_now_and_then_is_no_failure(late: Exception) -> None:
    valkey = Valkey(URL, "found", "lost", deadline_seconds=20)

    async def fails(_: Any) -> bool:
        raise late

    async def answers(_: Any) -> bool:
        return True

    for _ in range(3):
        for _ in range(MAX_LATE - 1):
            assert await valkey.call(fails) is None
            assert not valkey.is_backing_off
        assert await valkey.call(answers) is True
    await valkey.close()
