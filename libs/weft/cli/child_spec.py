"""What a child process of a supervisor is told to be, when it is started again, and who hears of what becomes of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

# a child that ends so has been told something that trying again cannot mend
CONFIG_EXIT_CODE = 2


class ChildState(StrEnum):
    """What a child is doing."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    BACKING_OFF = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When a dead child is started again. Times in seconds."""

    first_backoff: float = 0.5
    max_backoff: float = 10.0
    # ready for so long, a child begins anew
    healthy: float = 30.0
    # one that has never been ready is given up after so many deaths
    max_first_failures: int = 5
    # so long is enough for one that can be forked: a new start costs next to nothing
    healthy_if_forked: float = 10.0

    def backoff(self, failures: int) -> float:
        """The pause after so many deaths in a row."""
        return float(min(self.max_backoff, self.first_backoff * 2 ** min(failures - 1, 16)))


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """How to run one child. `probe` returns False until the child can be used, `probe_again` where it could be once
    and was started anew; the same where there is none.

    It starts when all named in `after` are ready, and is stopped before those of a lower `tier`. It is ended when it is
    not ready after `start_seconds`, counted anew whenever a child says how far it has come if it `heeds_progress`: one
    may wait for what another one does. `order` is the line
    for which the standby process forks this child, where it can do that. One that `leads_session` has its cores dealt
    out beside the others', where the kernel does that by session; forked ones always have. With more anonymous memory
    than `memory_bytes` it is logged, with far more ended; 0: neither.
    """

    name: str
    command: Sequence[str]
    environ: Mapping[str, str]
    probe: Callable[[], Awaitable[bool]]
    after: tuple[str, ...] = ()
    tier: int = 0
    start_seconds: float = 60.0
    heeds_progress: bool = False
    fork_request: bytes = b""
    leads_session: bool = False
    probe_again: Callable[[], Awaitable[bool]] | None = None
    memory_bytes: int = 0


class ChildFailed(Exception):
    """A child cannot be kept running; the mesh is to end with `exit_code`."""

    def __init__(self, name: str, reason: str, last_lines: Sequence[str], exit_code: int) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name
        self.last_lines = tuple(last_lines)
        self.exit_code = exit_code


class Listener(Protocol):
    """Who is told. Called on the loop; must not block."""

    def on_line(self, name: str, line: str) -> None:
        """A child wrote a line."""

    def on_state(self, name: str, state: ChildState, detail: str) -> None:
        """A child has come to this state."""

    def on_death(self, name: str, how: str, last_lines: Sequence[str], retry_seconds: float) -> None:
        """A child died that nobody stopped."""
