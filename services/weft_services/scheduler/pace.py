"""Work that is wanted again and again, and must not take all of a process' time: at once while it is quick, else for
several occasions together. Knows nothing of the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

# for so many times as long as it was done in vain the work rests
REST_SHARE = 9


class Pace:
    """Does `work` soon after every `ask`, in vain for a tenth of the time at most: it says for how many seconds it was.
    Belongs to one event loop."""

    def __init__(self, work: Callable[[], float], clock: Callable[[], float]) -> None:
        self._work = work
        self._clock = clock
        self._not_before = 0.0
        self._is_due = False

    def ask(self) -> None:
        """Now, if it has rested for long enough."""
        if self._is_due:
            return
        rest = self._not_before - self._clock()
        if rest <= 0:
            self._do()
        else:
            self._is_due = True
            asyncio.get_running_loop().call_later(rest, self._do)

    def _do(self) -> None:
        self._is_due = False
        vain_seconds = self._work()
        self._not_before = self._clock() + REST_SHARE * vain_seconds
