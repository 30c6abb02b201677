"""The threads in which texts are worked on, and whose turn it is."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from typing import TypeVar

from weft_services.gateway.access.visitor import visitor

NUM_THREADS = 2
# each thread has the next one at hand: the loop may be busy when it is done
NUM_HANDED_OUT = 2 * NUM_THREADS
ResultT = TypeVar("ResultT")
Turn = asyncio.Future[None]


class Workshop:
    """The threads that tokenize. Where they are all busy, tenants take turns, so that nobody waits for all that another
    has sent. As many wait as requests are admitted."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="text")
        self._num_free = NUM_HANDED_OUT
        self._lines: OrderedDict[str, deque[Turn]] = OrderedDict()  # none is empty; the first is served next

    async def do(self, work: Callable[[], ResultT]) -> ResultT:
        """Run in a thread, for the same visitor. Work whose caller is cancelled ends by itself; it is bounded."""
        await self._turn(visitor.get().tenant)
        try:
            job = self._pool.submit(copy_context().run, work)
        except RuntimeError:  # the system has no thread for it, now
            self._call_next()
            raise
        try:
            return await asyncio.wrap_future(job)
        finally:
            self._leave_with(job)

    def close(self) -> None:
        """Forget what has not begun."""
        for turn in [turn for line in self._lines.values() for turn in line]:
            turn.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, tenant: str) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._lines.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._forget(tenant, turn)
            else:  # it was its turn just now
                self._call_next()
            raise

    def _forget(self, tenant: str, turn: Turn) -> None:
        if turn not in (line := self._lines.get(tenant, deque())):
            return
        line.remove(turn)
        if not line:
            del self._lines[tenant]

    def _leave_with(self, job: Future[ResultT]) -> None:
        """Somebody else's turn when it is done: a job that nobody waits for any more may still hold its thread."""
        if job.done():
            self._call_next()
            return
        loop = asyncio.get_running_loop()

        def call_next(_: Future[ResultT]) -> None:
            with suppress(RuntimeError):  # the loop has ended before
                loop.call_soon_threadsafe(self._call_next)

        job.add_done_callback(call_next)

    def _call_next(self) -> None:
        while self._lines:
            tenant, line = next(iter(self._lines.items()))
            turn = line.popleft()
            if line:
                self._lines.move_to_end(tenant)
            else:
                del self._lines[tenant]
            if not turn.done():  # else it was cancelled, and does not know yet
                turn.set_result(None)
                return
        self._num_free += 1
