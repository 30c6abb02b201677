"""Work that begins where it is called."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

import pytest

from weft_services.scheduler.service import start_eagerly

where: ContextVar[str] = ContextVar("where", default="outside")


async def test_what_waits_for_nothing_is_over_at_once() -> None:
    done: list[str] = []

    async def work() -> None:
        done.append("done")

    async with asyncio.TaskGroup() as group:
        assert start_eagerly(group, work()) is None
        assert done == ["done"]


async def test_the_rest_is_a_task_in_the_context_that_it_began_in() -> None:
    loop, said = asyncio.get_running_loop(), list[str]()
    first, second = loop.create_future(), loop.create_future()

    async def work() -> None:
        token = where.set("inside")
        said.append(await first)
        await asyncio.sleep(0)
        try:
            await second
        except ValueError as error:
            said.append(str(error))
        said.append(where.get())
        where.reset(token)

    async with asyncio.TaskGroup() as group:
        task = start_eagerly(group, work())
        assert task is not None
        assert where.get() == "outside"
        first.set_result("first")  # before the task has had its first turn
        await asyncio.sleep(0)
        second.set_exception(ValueError("second"))
    assert said == ["first", "second", "inside"]


async def test_a_cancellation_reaches_it() -> None:
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    cleaned: list[bool] = []

    async def work() -> None:
        try:
            await never
        finally:
            cleaned.append(never.cancelled())

    async with asyncio.TaskGroup() as group:
        task = start_eagerly(group, work())
        assert task is not None
        await asyncio.sleep(0)
        task.cancel()
    assert task.cancelled()
    assert cleaned == [True]


async def test_a_cancellation_before_the_first_turn_reaches_it_as_well() -> None:
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    cleaned: list[str] = []

    async def work() -> None:
        token = where.set("inside")
        try:
            await never
        finally:
            cleaned.append(where.get())
            where.reset(token)

    async with asyncio.TaskGroup() as group:
        task = start_eagerly(group, work())
        assert task is not None
        task.cancel()
    assert task.cancelled()
    assert cleaned == ["inside"]


async def test_errors() -> None:
    async def early() -> None:
        raise ValueError("early")

    async def late() -> None:
        await asyncio.wait({asyncio.get_running_loop().create_future()}, timeout=0.01)
        raise ValueError("late")

    async def both() -> None:
        async with asyncio.TaskGroup() as group:
            with pytest.raises(ValueError, match="early"):
                start_eagerly(group, early())
            start_eagerly(group, late())

    with pytest.raises(ExceptionGroup) as raised:
        await both()
    assert [str(error) for error in raised.value.exceptions] == ["late"]
