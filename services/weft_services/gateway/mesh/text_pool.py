"""The threads that tokenize, shared fairly between tenants."""

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
# Each thread has one job queued, because the event loop may be busy when it finishes.
NUM_HANDED_OUT = 2 * NUM_THREADS
ResultT = TypeVar("ResultT")
Slot = asyncio.Future[None]


class FairThreadPool:
    """Thread pool that serves tenants in turn when all threads are busy.

    The number of admitted requests bounds the queues.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="text")
        self._num_free = NUM_HANDED_OUT
        # Never holds an empty queue; the first is served next.
        self._queues: OrderedDict[str, deque[Slot]] = OrderedDict()

    async def run(self, work: Callable[[], ResultT]) -> ResultT:
        """Run `work` in a thread with the caller's context.

        Cancelling the caller does not stop the work; its size is bounded.
        """
        await self._acquire(current_principal.get().tenant)
        try:
            job = self._pool.submit(copy_context().run, work)
        except RuntimeError:  # The system cannot start a thread now.
            self._release()
            raise
        try:
            return await asyncio.wrap_future(job)
        finally:
            self._release_after(job)

    def close(self) -> None:
        """Drop the work that has not started."""
        for slot in [slot for queue in self._queues.values() for slot in queue]:
            slot.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _acquire(self, tenant: str) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        slot = asyncio.get_running_loop().create_future()
        self._queues.setdefault(tenant, deque()).append(slot)
        try:
            await slot
        except asyncio.CancelledError:
            if slot.cancelled():
                self._remove(tenant, slot)
            else:  # The slot was granted just before the cancellation.
                self._release()
            raise

    def _remove(self, tenant: str, slot: Slot) -> None:
        if slot not in (queue := self._queues.get(tenant, deque())):
            return
        queue.remove(slot)
        if not queue:
            del self._queues[tenant]

    def _release_after(self, job: Future[ResultT]) -> None:
        """Free the slot when the job ends; a cancelled caller's job may still occupy its thread."""
        if job.done():
            self._release()
            return
        loop = asyncio.get_running_loop()

        def release(_: Future[ResultT]) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._release)

        job.add_done_callback(release)

    def _release(self) -> None:
        while self._queues:
            tenant, queue = next(iter(self._queues.items()))
            slot = queue.popleft()
            if queue:
                self._queues.move_to_end(tenant)
            else:
                del self._queues[tenant]
            if not slot.done():  # otherwise cancelled, with the exception still pending
                slot.set_result(None)
                return
        self._num_free += 1
