"""Types of the supervisor: a child's specification, its restart policy, its states, and the listener."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

# exit status for a setting or model that another start cannot mend
CONFIG_EXIT_CODE = 2


class ChildState(StrEnum):
    """State of a child under the supervisor."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    BACKING_OFF = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When the supervisor restarts a dead child; times in seconds."""

    first_backoff: float = 0.5
    max_backoff: float = 10.0
    # ready for this long, a child's earlier failures no longer count
    healthy: float = 30.0
    # the supervisor gives up a child that has died this often without being ready
    max_first_failures: int = 5
    # `healthy` of a forked child, as it restarts within a second
    healthy_if_forked: float = 10.0

    def backoff(self, failures: int) -> float:
        """Return the pause after `failures` deaths in a row."""
        return float(min(self.max_backoff, self.first_backoff * 2 ** min(failures - 1, 16)))


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """How to run one child.

    probe: returns False until the child can be used.
    after: names of children that must be ready before it starts.
    tier: children of a higher tier stop first.
    start_seconds: the child is killed if it is not ready by then.
    heeds_progress: progress of any child restarts the start timeout, as one may wait for another.
    fork_request: request line for the fork server; empty: the child is spawned.
    leads_session: it leads a session, so that the kernel's autogroups schedule it apart. Forked children always do.
    probe_again: probe after a restart of a child that was ready once; None: `probe`.
    memory_bytes: planned anonymous memory. Above it the supervisor warns, far above it kills; 0: neither.
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
    """A child cannot be kept running; the mesh ends with `exit_code`."""

    def __init__(self, name: str, reason: str, last_lines: Sequence[str], exit_code: int) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name
        self.last_lines = tuple(last_lines)
        self.exit_code = exit_code


class Listener(Protocol):
    """Receives events of the supervisor, on its event loop; must not block."""

    def on_line(self, name: str, line: str) -> None:
        """Receive a line that a child wrote."""

    def on_state(self, name: str, state: ChildState, detail: str) -> None:
        """Receive a child's new state."""

    def on_death(self, name: str, how: str, last_lines: Sequence[str], retry_seconds: float) -> None:
        """Receive the unexpected death of a child."""
