"""Where other threads leave work for the engine's thread. Knows when to refuse, not what the work means."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from weft.engine.sequence import Sequence
from weft.errors import EngineFailed, Overloaded

Command = Callable[[], None]


class CommandQueue:
    """New sequences are bounded by `max_waiting`; commands about them are few per sequence, and so bounded too."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._changed = threading.Condition()
        self._items: deque[Sequence | Command] = deque()
        self._num_submitted = 0
        self._num_waiting = 0
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Nothing more is taken in."""
        return self._is_closed

    def submit(self, sequence: Sequence) -> None:
        """A new sequence. Raises Overloaded when too many wait, EngineFailed after `close`."""
        with self._changed:
            if self._is_closed:
                raise EngineFailed("the engine has ended")
            if self._num_waiting + self._num_submitted >= self._max_waiting:
                raise Overloaded(f"{self._num_waiting + self._num_submitted} sequences are waiting already")
            self._num_submitted += 1
            self._items.append(sequence)
            self._changed.notify()

    def post(self, command: Command) -> None:
        """A command; after `close` it is dropped, as there is nothing left that it could be about."""
        with self._changed:
            if not self._is_closed:
                self._items.append(command)
                self._changed.notify()

    def take(self, timeout: float | None) -> list[Sequence | Command]:
        """Everything there is, in order; with none, wait for some or for `close`, `timeout` seconds at most."""
        with self._changed:
            if not self._items and not self._is_closed:
                self._changed.wait(timeout)
            items = list(self._items)
            self._items.clear()
            # until the engine's thread has counted them among its own
            self._num_waiting += self._num_submitted
            self._num_submitted = 0
            return items

    def set_num_waiting(self, num_waiting: int) -> None:
        """The engine's thread tells how many of those it took have not been admitted."""
        with self._changed:
            self._num_waiting = num_waiting

    def close(self) -> None:
        """Take in nothing more and wake the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
