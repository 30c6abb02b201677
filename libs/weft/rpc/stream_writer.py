"""Writes stream messages in the current event-loop iteration, without a writer task.

A writer task would wake one iteration later, and the library's iterator another one. Each iteration takes tens of
microseconds in an idle process. So `push` starts the write; its future continues it. Messages that arrive meanwhile
follow in one batch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

from weft.errors import PeerLost
from weft.rpc.client import cancelled_on_exit

logger = logging.getLogger(__name__)
CallT = TypeVar("CallT")
MessageT = TypeVar("MessageT")


class EagerStreamWriter(Generic[MessageT]):
    """Single writer of one stream; messages go out in order. The source of `take` bounds the backlog."""

    def __init__(
        self,
        write: Callable[[MessageT], Coroutine[Any, Any, None]],
        take: Callable[[], MessageT | None],
        on_failure: Callable[[], object],
    ) -> None:
        """- `take`: returns the next message, or None.
        - `on_failure`: called once when a write fails; the stream has ended or must end.
        """
        self._write = write
        self._take = take
        self._on_failure = on_failure
        self._writing: Coroutine[Any, Any, None] | None = None
        self._is_over = False
        self.failure: BaseException | None = None

    def push(self) -> None:
        """Start writing the next message, unless a write is in progress; that write then continues with it."""
        while self._writing is None and not self._is_over and (message := self._take()) is not None:
            self._writing = self._write(message)
            self._advance()

    def close(self) -> None:
        """Write nothing more; a write in progress ends with its call."""
        self._is_over = True

    def fail(self, why: BaseException) -> None:
        """End the stream as if a write had failed."""
        self._is_over, self.failure = True, why
        self._on_failure()

    def _advance(self) -> None:
        """Step the write coroutine until it waits, as a task would."""
        assert self._writing is not None
        try:
            awaited = self._writing.send(None)
        except StopIteration:
            self._writing = None
        except (Exception, asyncio.CancelledError) as error:  # A cancelled write also ends the stream.
            self._writing, self._is_over, self.failure = None, True, error
            logger.info("stream ended during a write error=%s", error)
            self._on_failure()
        else:
            awaited._asyncio_future_blocking = False  # asyncio's sign that a task awaits this future
            awaited.add_done_callback(self._on_awaited_done)

    def _on_awaited_done(self, awaited: asyncio.Future[Any]) -> None:
        self._advance()
        self.push()


@asynccontextmanager
async def writing_to(
    call: CallT, take: Callable[[], MessageT | None]
) -> AsyncIterator[tuple[CallT, EagerStreamWriter[MessageT]]]:
    """Yield a bidirectional client call, cancelled at the end, and its writer. Raises WeftError."""
    handle: Any = call
    writer = EagerStreamWriter(handle.write, take, handle.cancel)
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
