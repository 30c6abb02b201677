"""Writes the messages of a bidirectional stream in a task, so that the sender never waits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

from weft.errors import PeerLost
from weft.rpc.client import cancelled_on_exit

logger = logging.getLogger(__name__)
CallT = TypeVar("CallT")
MessageT = TypeVar("MessageT")


class StreamWriter(Generic[MessageT]):
    """Writes the messages of one stream in order, in a task of its own. The source of `take` bounds the backlog."""

    def __init__(
        self,
        write: Callable[[MessageT], Awaitable[None]],
        take: Callable[[], MessageT | None],
        on_failure: Callable[[], object],
    ) -> None:
        """- `take`: returns the next message, or None.
        - `on_failure`: called once when a write fails; the stream has ended or must end.
        """
        self._write = write
        self._take = take
        self._on_failure = on_failure
        self._is_over = False
        self._has_message = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name="stream writer")
        self.failure: BaseException | None = None

    def push(self) -> None:
        """Write what `take` returns, after the write in progress."""
        self._has_message.set()

    def close(self) -> None:
        """Write nothing more; a write in progress ends with its call."""
        self._is_over = True
        self._task.cancel()

    def fail(self, why: BaseException) -> None:
        """End the stream as if a write had failed."""
        self.failure = why
        self.close()
        self._on_failure()

    async def _run(self) -> None:
        try:
            while await self._has_message.wait():
                self._has_message.clear()
                while (message := self._take()) is not None:
                    await self._write(message)
        except (Exception, asyncio.CancelledError) as error:  # A cancelled write also ends the stream.
            if not self._is_over:
                logger.info("stream ended during a write error=%s", error)
                self.fail(error)


@asynccontextmanager
async def writing_to(
    call: CallT, take: Callable[[], MessageT | None]
) -> AsyncIterator[tuple[CallT, StreamWriter[MessageT]]]:
    """Yield a bidirectional client call, cancelled at the end, and its writer. Raises WeftError."""
    handle: Any = call
    writer = StreamWriter(handle.write, take, handle.cancel)
    try:
        async with cancelled_on_exit(call):
            yield call, writer
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if writer.failure is None or (task is not None and task.cancelling()):
            raise
        raise PeerLost(f"the stream can no longer be written: {writer.failure}") from writer.failure
    finally:
        writer.close()
