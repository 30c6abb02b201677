"""When readers of inboxes are woken: at once while there is time for that, else for several frames together.

Waking everybody whose tokens a frame brings takes longer than taking a frame in. So after a delivery as much time
belongs to frames as it has taken itself: on a loop that keeps up nothing waits, on one that does not, answers are
written less often and longer each.
"""

from __future__ import annotations

import asyncio

from weft_services.gateway.mesh.inbox import Inbox

# what held the loop up for longer was something else
LONGEST_PAUSE_SECONDS = 0.02


class Delivery:
    """One for all streams of this gateway."""

    def __init__(self) -> None:
        self._marked: dict[Inbox, None] = {}
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
        loop = asyncio.get_running_loop()
        self._began = loop.time()
        for inbox in self._marked:
            inbox.wake()
        self._marked.clear()
        loop.call_soon(self._delivered)  # behind all that were woken

    def _delivered(self) -> None:
        now = asyncio.get_running_loop().time()
        self._not_before = now + min(now - self._began, LONGEST_PAUSE_SECONDS)
        self._is_due = False
        self.settle()
