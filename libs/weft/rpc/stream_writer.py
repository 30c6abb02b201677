"""What goes out on a stream, written in the very turn of the loop in which it is there.

A task that waits for messages and writes them would be woken a turn later, and another one reading the library's own
iterator: each turn is some tens of microseconds of a process that was idle. So a write begins where the message is
made, and is gone on with by what it waits for; what comes meanwhile goes out together after it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

from weft.errors import PeerLost
from weft.rpc.client import owned

logger = logging.getLogger(__name__)
CallT = TypeVar("CallT")
MessageT = TypeVar("MessageT")


class Outgoing(Generic[MessageT]):
    """One writer of one stream, whose messages go out one after the other. Its bound is that of `take`'s source."""

    def __init__(
        self,
        write: Callable[[MessageT], Coroutine[Any, Any, None]],
        take: Callable[[], MessageT | None],
        on_failure: Callable[[], object],
    ) -> None:
        """`take`: the next message, or None. `on_failure`: a write has failed, and there will be no other; the stream
        has ended, or has to."""
        self._write = write
        self._take = take
        self._on_failure = on_failure
        self._writing: Coroutine[Any, Any, None] | None = None
        self._is_over = False
        self.failure: BaseException | None = None

    def push(self) -> None:
        """There is something to take. Begins to write it, unless a write is under way, after which it comes."""
        while self._writing is None and not self._is_over and (message := self._take()) is not None:
            self._writing = self._write(message)
            self._go_on()

    def close(self) -> None:
        """Write nothing more; what is under way ends with its call."""
        self._is_over = True

    def give_up(self, why: BaseException) -> None:
        """The stream is of no more use: it ends as if a write had failed."""
        self._is_over, self.failure = True, why
        self._on_failure()

    def _go_on(self) -> None:
        """As far as it goes without waiting: what a task does, but here and now."""
        assert self._writing is not None
        try:
            awaited = self._writing.send(None)
        except StopIteration:
            self._writing = None
        except (Exception, asyncio.CancelledError) as error:  # a write that was cancelled is no less over
            self._writing, self._is_over, self.failure = None, True, error
            logger.info("a stream has ended while it was written to: %s", error)
            self._on_failure()
        else:
            awaited._asyncio_future_blocking = False  # asyncio's own sign that somebody minds the future
            awaited.add_done_callback(self._waited)

    def _waited(self, awaited: asyncio.Future[Any]) -> None:
        self._go_on()
        self.push()


@asynccontextmanager
async def speaking(call: CallT, take: Callable[[], MessageT | None]) -> AsyncIterator[tuple[CallT, Outgoing[MessageT]]]:
    """A call of a client's that streams both ways, owned, and what is said in it. Raises WeftError."""
    handle: Any = call
    outgoing = Outgoing(handle.write, take, handle.cancel)
    try:
        async with owned(call):
            yield call, outgoing
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if outgoing.failure is None or (task is not None and task.cancelling()):
            raise
        raise PeerLost(f"nothing more can be said: {outgoing.failure}") from outgoing.failure
    finally:
        outgoing.close()
