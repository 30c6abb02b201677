"""The child processes of the supervisor: how to run one, its states, and one that runs.

A child is started in a group or session of its own, its output is read by lines, and it ends with its descendants.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

MAX_LINE_BYTES = 16 * 1024
READ_BYTES = 64 * 1024
KEPT_LINES = 15
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
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


class Process(Protocol):
    """The part of a process handle that Child needs, forked or spawned."""

    @property
    def pid(self) -> int: ...

    async def wait(self) -> int:
        """Return the exit code; a negative number is the signal that ended it."""

    def send_signal(self, number: int, /) -> None:
        """Raises ProcessLookupError when it has ended."""


class Child:
    """A running process and the last lines it wrote."""

    def __init__(self, process: Process, output: asyncio.StreamReader) -> None:
        self._process = process
        self._output = output
        self.last_lines: deque[str] = deque(maxlen=KEPT_LINES)

    @property
    def pid(self) -> int:
        """The process id, also that of its process group."""
        return self._process.pid

    @classmethod
    async def start(cls, command: Sequence[str], environ: Mapping[str, str], leads_session: bool = False) -> Child:
        """Start a process that dies with this one. Raises OSError when it cannot be run."""
        read_end, write_end = os.pipe()
        parent = os.getpid()
        try:
            # Our own pipe: with asyncio's, waiting for the process would wait for every descendant that inherited it.
            process = await asyncio.create_subprocess_exec(
                *command,
                env=dict(environ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                process_group=None if leads_session else 0,
                start_new_session=leads_session,
                preexec_fn=lambda: die_with(parent),
            )
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        return cls(process, await open_output(read_end))

    async def read_lines(self, on_line: Callable[[str], None]) -> None:
        """Pass on each line until the last process closes the output; lines over MAX_LINE_BYTES come in pieces."""
        rest = b""
        while chunk := await self._output.read(READ_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > MAX_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._keep(line, on_line)
        if rest:
            self._keep(rest, on_line)

    def _keep(self, line: bytes, on_line: Callable[[str], None]) -> None:
        text = line.decode(errors="replace").rstrip()
        if text:
            self.last_lines.append(text)
            on_line(text)

    async def wait(self) -> int:
        """Return the exit code; a negative number is the signal that ended it. May be awaited many times."""
        return await self._process.wait()

    def signal_group(self, number: signal.Signals) -> None:
        """Signal the process and its descendants; nothing happens when none is left."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    async def stop(self, grace_seconds: float) -> int:
        """SIGTERM to the process, SIGKILL to what is left of its group afterwards or after the grace."""
        with contextlib.suppress(ProcessLookupError, TimeoutError):
            self._process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(grace_seconds):
                await self.wait()
        self.signal_group(signal.SIGKILL)
        return await self.wait()


async def open_output(read_end: int) -> asyncio.StreamReader:
    """Return a reader of a pipe, which closes at end of file."""
    output = asyncio.StreamReader(limit=READ_BYTES)
    pipe = os.fdopen(read_end, "rb", buffering=0)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(output), pipe)
    return output


def die_with(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Make the kernel signal this process when its parent ends. Runs in the new process before exec."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


def describe_exit(code: int) -> str:
    """Return an exit code in words: `exit code 1`, `killed by SIGKILL`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
