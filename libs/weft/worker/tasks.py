"""A task group for background work: what still runs at the end of its scope is cancelled instead of awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from weft.cancellation import cancellation_heeded


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
