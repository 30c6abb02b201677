"""When readers of inboxes are woken: at once while there is time for that, else for several frames together.

Waking everybody whose tokens a frame brings takes longer than taking a frame in. So after a delivery as much time
belongs to frames as it has taken itself: on a loop that keeps up nothing waits, on one that does not, answers are
written less often and longer each.
"""

from __future__ import annotations

import asyncio
from itertools import islice

from weft_services.gateway.mesh.inbox import Inbox

# what held the loop up for longer was something else
LONGEST_PAUSE_SECONDS = 0.02
# woken in one turn of the loop: a frame for ten thousand streams must not keep everything else waiting
MAX_AT_ONCE = 256


class Delivery:
    """One for all streams of this gateway."""

    def __init__(self) -> None:
        self._marked: dict[Inbox, None] = {}
        self._waking: dict[Inbox, None] = {}  # those of the delivery under way
        self._began = 0.0
        self._not_before = 0.0
        self._is_due = False

    def mark(self, inbox: Inbox) -> None:
        """Something new lies in it; `settle` follows."""
        self._marked[inbox] = None

    def settle(self) -> None:
        """Wake whom it concerns, now or soon."""
        if self._is_due or not self._marked:
            return
        loop = asyncio.get_running_loop()
        self._is_due = True
        if loop.time() < self._not_before:
            loop.call_at(self._not_before, self._deliver)
        else:
            self._deliver()

    def _deliver(self) -> None:
        self._began = asyncio.get_running_loop().time()
        self._waking, self._marked = self._marked, self._waking
        self._wake_some()

    def _wake_some(self) -> None:
        for inbox in list(islice(self._waking, MAX_AT_ONCE)):
            del self._waking[inbox]
            inbox.wake()
        asyncio.get_running_loop().call_soon(self._delivered)  # behind all that were woken

    def _delivered(self) -> None:
        if self._waking:
            self._wake_some()
            return
        now = asyncio.get_running_loop().time()
        self._not_before = now + min(now - self._began, LONGEST_PAUSE_SECONDS)
        self._is_due = False
        self.settle()
