"""The threads in which texts are worked on, and whose turn it is."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from typing import TypeVar

from weft_services.gateway.access.authentication import current_principal

NUM_THREADS = 2
# each thread has the next one at hand: the loop may be busy when it is done
NUM_HANDED_OUT = 2 * NUM_THREADS
ResultT = TypeVar("ResultT")
Slot = asyncio.Future[None]


class FairThreadPool:
    """The threads that tokenize. Where they are all busy, tenants take turns, so that nobody waits for all that another
    has sent. As many wait as requests are admitted."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="text")
        self._num_free = NUM_HANDED_OUT
        self._queues: OrderedDict[str, deque[Slot]] = OrderedDict()  # none is empty; the first is served next

    async def run(self, work: Callable[[], ResultT]) -> ResultT:
        """Run in a thread, for the same principal. Work whose caller is cancelled ends by itself; it is bounded."""
        await self._acquire(current_principal.get().tenant)
        try:
            job = self._pool.submit(copy_context().run, work)
        except RuntimeError:  # the system has no thread for it, now
            self._release()
            raise
        try:
            return await asyncio.wrap_future(job)
        finally:
            self._release_after(job)

    def close(self) -> None:
        """Forget what has not begun."""
        for turn in [turn for line in self._queues.values() for turn in line]:
            turn.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _acquire(self, tenant: str) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._queues.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._forget(tenant, turn)
            else:  # it was its turn just now
                self._release()
            raise

    def _forget(self, tenant: str, turn: Slot) -> None:
        if turn not in (line := self._queues.get(tenant, deque())):
            return
        line.remove(turn)
        if not line:
            del self._queues[tenant]

    def _release_after(self, job: Future[ResultT]) -> None:
        """Somebody else's turn when it is done: a job that nobody waits for any more may still hold its thread."""
        if job.done():
            self._release()
            return
        loop = asyncio.get_running_loop()

        def call_next(_: Future[ResultT]) -> None:
            with suppress(RuntimeError):  # the loop has ended before
                loop.call_soon_threadsafe(self._release)

        job.add_done_callback(call_next)

    def _release(self) -> None:
        while self._queues:
            tenant, line = next(iter(self._queues.items()))
            turn = line.popleft()
            if line:
                self._queues.move_to_end(tenant)
            else:
                del self._queues[tenant]
            if not turn.done():  # else it was cancelled, and does not know yet
                turn.set_result(None)
                return
        self._num_free += 1
