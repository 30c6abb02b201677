"""Ends a child that takes far more memory than was planned for it, before it takes the machine.

Anonymous memory counts (heaps, stacks), of the process and its descendants: images of weights and a CPU worker's KV
pool are shared memory. A machine that runs out of memory lets the kernel choose a victim, and all others swap or lose
their page cache first. Reads /proc; where there is none nothing is watched.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from weft.capacity.host_limits import available_bytes
from weft.capacity.layout import GIB
from weft.cli.child import Child

PROC = Path("/proc")
MIB = 1 << 20
PERIOD_SECONDS = 1.0
WARN_RATIO = 1.3
# beyond both a child is ended, however much memory the machine has left
HARD_RATIO, HARD_EXTRA_BYTES = 3, 4 * GIB
# with less than this left on the machine, one beyond WARN_RATIO is; no more than a tenth of all memory
LEAST_LEFT_BYTES = GIB
STOP_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes of anonymous memory that a child is expected to take at most; 0: it is not watched."""

    planned: int = 0

    @property
    def warn_bytes(self) -> int:
        """Anonymous memory in bytes above which a warning is logged."""
        return int(self.planned * WARN_RATIO)

    @property
    def hard_bytes(self) -> int:
        """With more the child is ended."""
        return max(self.planned * HARD_RATIO, self.planned + HARD_EXTRA_BYTES)

    def is_over(self, used: int, left: int) -> bool:
        """The child has to end; `left` is what the machine has available."""
        return used > self.hard_bytes or (used > self.warn_bytes and left < least_left_bytes())


def least_left_bytes() -> int:
    """What a machine of this size has to have left."""
    return min(LEAST_LEFT_BYTES, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 10)


def anonymous_bytes(pid: int, proc: Path = PROC) -> int:
    """Of a process and its descendants, as far as they are still there."""
    try:
        below = (proc / str(pid) / "task" / str(pid) / "children").read_text().split()
    except OSError:
        return 0
    return own_anonymous_bytes(pid, proc) + sum(anonymous_bytes(int(child), proc) for child in below)


def own_anonymous_bytes(pid: int, proc: Path = PROC) -> int:
    """Of the process alone; 0 when it has ended."""
    try:
        status = (proc / str(pid) / "status").read_text()
    except OSError:
        return 0
    kib = next((line.split()[1] for line in status.splitlines() if line.startswith("RssAnon:")), "0")
    return int(kib) * 1024


class MemoryGuard:
    """Watches one life of a child."""

    def __init__(
        self,
        plan: MemoryPlan,
        say: Callable[[str], None],
        measure: Callable[[int], int] = anonymous_bytes,
        left: Callable[[], int] = available_bytes,
    ) -> None:
        """`say` receives a line for the log."""
        self._plan = plan
        self._say = say
        self._measure = measure
        self._left = left
        self._has_warned = False
        self.verdict = ""  # why the child was ended

    async def watch(self, child: Child) -> None:
        """Look once a second, until cancelled or the child had to be ended."""
        while self._plan.planned and not self.verdict:
            await asyncio.sleep(PERIOD_SECONDS)
            self.look(child.pid)
        if self.verdict:
            await child.stop(STOP_SECONDS)

    def look(self, pid: int) -> None:
        """Measure, log the first time beyond the plan, and judge."""
        used = self._measure(pid)
        if used <= self._plan.warn_bytes:
            self._has_warned = False
            return
        figures = f"used_mib={used // MIB} planned_mib={self._plan.planned // MIB} pid={pid}"
        if self._plan.is_over(used, self._left()):
            self.verdict = f"memory: {used // MIB} MiB taken, {self._plan.planned // MIB} MiB planned"
            self._say(f"memory far beyond plan, process is ended {figures}")
        elif not self._has_warned:
            self._has_warned = True
            self._say(f"memory beyond plan {figures}")
