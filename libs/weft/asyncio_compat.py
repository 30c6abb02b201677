"""Cancellations that others drop: Python's task groups and waits do, up to 3.11 or 3.12.

A task group for background work: what still runs at the end of its scope is cancelled instead of awaited.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager


@contextmanager
def cancellation_heeded() -> Iterator[None]:
    """Around what may drop the cancellation of its own task, which is raised behind the block then. On a task.

    A TaskGroup that fails waits for its tasks, and drops one that comes meanwhile where its errors are caught (CPython
    up to 3.12). `asyncio.wait_for` drops one that comes with the result (up to 3.11): redis-py writes by it.

    A group's body has to last as long as its tasks do, or raise: one that fails after the body has returned leaves
    its own task marked as cancelled, in those versions, and nobody could tell that from a real cancellation."""
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    yield
    if task.cancelling() > before:
        raise asyncio.CancelledError


class _ScopeEnds(Exception):
    """Makes the group cancel what is left."""


@asynccontextmanager
async def background() -> AsyncIterator[asyncio.TaskGroup]:
    """A TaskGroup: a task that fails ends the scope, the scope's end ends the tasks."""
    with cancellation_heeded():
        try:
            async with asyncio.TaskGroup() as group:
                yield group
                raise _ScopeEnds
        except* _ScopeEnds:
            pass
