"""The threads in which texts are worked on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

NUM_THREADS = 2
ResultT = TypeVar("ResultT")


class Workshop:
    """The threads that tokenize. Its queue is bounded by the number of requests that are admitted."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="text")

    async def do(self, work: Callable[[], ResultT]) -> ResultT:
        """Run in a thread, for the same visitor. Work whose caller is cancelled ends by itself; it is bounded."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, copy_context().run, work)

    def close(self) -> None:
        """Forget what has not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)
