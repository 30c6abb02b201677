"""Thread-safe queue of new sequences and commands for the engine's thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from weft.engine.sequence import Sequence
from weft.errors import EngineFailed, Overloaded

Command = Callable[[], None]


class CommandQueue:
    """Bounded: `max_waiting` limits the sequences, and each sequence has only a few commands."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._changed = threading.Condition()
        self._items: deque[Sequence | Command] = deque()
        self._num_submitted = 0
        self._num_waiting = 0
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """True after `close`: the queue accepts nothing more."""
        return self._is_closed

    def submit(self, sequence: Sequence) -> None:
        """Add a new sequence. Raises Overloaded if too many wait, EngineFailed after `close`."""
        with self._changed:
            if self._is_closed:
                raise EngineFailed("the engine has ended")
            if self._num_waiting + self._num_submitted >= self._max_waiting:
                raise Overloaded(f"{self._num_waiting + self._num_submitted} sequences are waiting already")
            self._num_submitted += 1
            self._items.append(sequence)
            self._changed.notify()

    def post(self, command: Command) -> None:
        """Add a command. After `close` it is dropped, because no sequence is left."""
        with self._changed:
            if not self._is_closed:
                self._items.append(command)
                self._changed.notify()

    def take(self, timeout: float | None) -> list[Sequence | Command]:
        """Return all items in order. If there are none, wait for one or for `close`, up to `timeout` seconds."""
        with self._changed:
            if not self._items and not self._is_closed:
                self._changed.wait(timeout)
            items = list(self._items)
            self._items.clear()
            # Counted here until the engine's thread reports its own count.
            self._num_waiting += self._num_submitted
            self._num_submitted = 0
            return items

    def set_num_waiting(self, num_waiting: int) -> None:
        """Set how many of the taken sequences wait for admission. Called by the engine's thread."""
        with self._changed:
            self._num_waiting = num_waiting

    def close(self) -> None:
        """Accept nothing more and wake the engine's thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
