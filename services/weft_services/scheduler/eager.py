"""Coroutines that run from where they are called up to their first wait, and only then become tasks: what waits for
nothing costs no task and no turn of the loop. Tasks of Python 3.12 can do that by themselves; this is for 3.11 too.

What runs so early must not ask which task it is in, as `asyncio.timeout` does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from contextvars import copy_context
from typing import Any


def begin(group: asyncio.TaskGroup, work: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
    """The task that goes on with it in the group; None where it is over already. What it raises before its first wait
    is raised here."""
    context = copy_context()
    try:
        awaited = context.run(work.send, None)
    except StopIteration:
        return None
    task = group.create_task(_go_on(work, awaited), context=context)
    # one that is cancelled before its first turn never comes to the work, which has to let go of what it holds
    task.add_done_callback(lambda _: work.close(), context=context)
    return task


async def _go_on(work: Coroutine[Any, Any, None], awaited: Any) -> None:
    await _Begun(work, awaited)


class _Begun:
    """Work that waits for something."""

    def __init__(self, work: Coroutine[Any, Any, None], awaited: Any) -> None:
        self._work, self._awaited = work, awaited

    def __await__(self) -> Generator[Any, Any, None]:
        try:
            while True:
                try:
                    value = yield self._awaited
                except BaseException as error:  # a cancellation, for one: the work decides what comes of it
                    self._awaited = self._work.throw(error)
                else:
                    self._awaited = self._work.send(value)
        except StopIteration:
            return
