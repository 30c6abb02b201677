"""Task groups and cancellations, with work-arounds for CPython up to 3.12."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager


@contextmanager
def reraise_lost_cancellation() -> Iterator[None]:
    """Raise CancelledError after the block if the block swallowed a cancellation of the current task.

    A failing TaskGroup waits for its tasks and drops a cancellation that arrives meanwhile (CPython up to 3.12).
    `asyncio.wait_for` drops one that arrives together with the result (up to 3.11); redis-py writes through it.

    The group's body must last as long as its tasks do, or raise. A task that fails after the body has returned leaves
    the current task marked as cancelled in those versions, which looks like a real cancellation.
    """
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    yield
    if task.cancelling() > before:
        raise asyncio.CancelledError


class _ScopeEnds(Exception):
    """Raised at the end of a `background_tasks` scope to cancel its remaining tasks."""


@asynccontextmanager
async def background_tasks() -> AsyncIterator[asyncio.TaskGroup]:
    """Run a TaskGroup that cancels its remaining tasks at the end of the scope. A failing task ends the scope."""
    with reraise_lost_cancellation():
        try:
            async with asyncio.TaskGroup() as group:
                yield group
                raise _ScopeEnds
        except* _ScopeEnds:
            pass
