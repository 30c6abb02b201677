"""Keeps a set of child processes running: starts them by dependency, restarts the dead with backoff, stops them all.

Knows commands and readiness probes, not what the children do; what happens is told to a Listener.

    waiting -> starting -> ready -> backing off -> starting ...
                   \\-> backing off                  \\-> failed (ends everything)
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from weft.cli.child import Child, describe_exit
from weft.cli.nursery import Nursery
from weft.log import PROGRESS

MAX_PROBE_SECONDS = 0.25
# of the 5 s that Ctrl-C may take
STOP_SECONDS = 4.0
# of them, what the tiers below the one that is being stopped are sure of, each
LEAST_TIER_SECONDS = 0.5
# what a killed process group may take to let go of its output
DRAIN_SECONDS = 1.0
# a child that ends so has been told something that trying again cannot mend
CONFIG_EXIT_CODE = 2


class State(StrEnum):
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
    """How to run one child. `probe` returns False until the child can be used.

    It starts when all named in `after` are ready, and is stopped before those of a lower `tier`. It is ended when it is
    not ready after `start_seconds`, counted anew whenever a child says how far it has come if it `heeds_progress`: one
    may wait for what another one does. `order` is the line
    for which the standby process forks this child, where it can do that. One that `leads_session` has its cores dealt
    out beside the others', where the kernel does that by session; forked ones always have.
    """

    name: str
    command: Sequence[str]
    environ: Mapping[str, str]
    probe: Callable[[], Awaitable[bool]]
    after: tuple[str, ...] = ()
    tier: int = 0
    start_seconds: float = 60.0
    heeds_progress: bool = False
    order: bytes = b""
    leads_session: bool = False


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

    def on_state(self, name: str, state: State, detail: str) -> None:
        """A child has come to this state."""

    def on_death(self, name: str, how: str, last_lines: Sequence[str], retry_seconds: float) -> None:
        """A child died that nobody stopped."""


@dataclass(frozen=True, slots=True)
class _Life:
    how: str
    code: int
    last_lines: tuple[str, ...]
    # None: it was never ready
    ready_seconds: float | None


class Supervisor:
    """Owns the children from `run` until it ends."""

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        listener: Listener,
        policy: RestartPolicy | None = None,
        standby_command: Sequence[str] = (),
    ) -> None:
        """`standby_command` is a process that forks children for their `order`."""
        self._specs = tuple(specs)
        self._standby_command = tuple(standby_command)
        self._nursery: Nursery | None = None
        self._listener = listener
        self._policy = policy or RestartPolicy()
        self._ready = {spec.name: asyncio.Event() for spec in specs}
        self._start_seconds = {spec.name: spec.start_seconds for spec in specs}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._children: dict[str, Child] = {}
        # of those that heed progress and are not ready, until when; and how far each child has come, in its own words
        self._patience: dict[str, asyncio.Timeout] = {}
        self._progress: dict[str, str] = {}
        self._stopping = False

    @property
    def was_ready(self) -> bool:
        """Every child has been, once."""
        return all(event.is_set() for event in self._ready.values())

    async def wait_ready(self) -> None:
        """Until every child has been ready once."""
        for event in self._ready.values():
            await event.wait()

    async def run(self) -> None:
        """Keep all children running until `stop` or cancellation. Raises ChildFailed. Leaves no process behind."""
        failure: BaseException | None = None
        try:
            self._nursery = await self._open_nursery()
            if self._stopping:
                return  # there was nobody yet whom `stop` could have ended
            async with asyncio.TaskGroup() as group:
                for spec in self._specs:
                    self._keepers[spec.name] = group.create_task(self._keep(spec))
                await asyncio.wait(self._keepers.values())
        except* ChildFailed as failed:
            failure = failed.exceptions[0]
        finally:
            if self._nursery is not None:
                await self._nursery.close()
        if failure is not None:  # here: Python before 3.11.4 wraps what is raised above in a group once more
            raise failure

    async def stop(self) -> None:
        """End the children, highest tier first, within STOP_SECONDS; `run` then returns."""
        self._stopping = True
        for name, keeper in self._keepers.items():
            if name not in self._children:
                keeper.cancel()
        deadline = time.monotonic() + STOP_SECONDS
        for tier in sorted({spec.tier for spec in self._specs}, reverse=True):
            grace = max(0.0, deadline - time.monotonic() - tier * LEAST_TIER_SECONDS)
            async with asyncio.TaskGroup() as group:
                for spec in self._specs:
                    if spec.tier == tier and (child := self._children.get(spec.name)) is not None:
                        group.create_task(child.stop(grace))

    def kill(self) -> None:
        """End every process at once."""
        self._stopping = True
        for child in self._children.values():
            child.signal_group(signal.SIGKILL)

    async def _open_nursery(self) -> Nursery | None:
        environ = next((spec.environ for spec in self._specs if spec.order), None)
        if environ is None or not self._standby_command:
            return None
        try:
            return await Nursery.open(self._standby_command, environ)
        except OSError:
            return None  # every child can be started by itself

    async def _start(self, spec: ChildSpec) -> Child:
        """Forked where that is possible. Raises OSError."""
        forked = await self._nursery.bear(spec.order) if self._nursery and spec.order else None
        return forked or await Child.start(spec.command, spec.environ, spec.leads_session)

    def _was_healthy(self, spec: ChildSpec, life: _Life) -> bool:
        """Was ready for long, or for a while where it is forked."""
        is_forked = self._nursery is not None and self._nursery.is_open and bool(spec.order)
        enough = self._policy.healthy_if_forked if is_forked else self._policy.healthy
        return life.ready_seconds is not None and life.ready_seconds >= enough

    async def _keep(self, spec: ChildSpec) -> None:
        for name in spec.after:
            await self._ready[name].wait()
        failures = 0
        while True:
            life = await self._live(spec)
            if self._stopping:
                self._listener.on_state(spec.name, State.STOPPED, life.how)
                return
            failures = 0 if self._was_healthy(spec, life) else failures + 1
            self._give_up_on(spec, life, failures)
            # what was well is started again at once
            pause = self._policy.backoff(failures) if failures else 0.0
            self._listener.on_death(spec.name, life.how, life.last_lines, pause)
            self._listener.on_state(spec.name, State.BACKING_OFF, life.how)
            await asyncio.sleep(pause)

    def _give_up_on(self, spec: ChildSpec, life: _Life, failures: int) -> None:
        """Raises ChildFailed where another start would not help."""
        hopeless = life.code == CONFIG_EXIT_CODE
        if hopeless or (not self._ready[spec.name].is_set() and failures >= self._policy.max_first_failures):
            self._listener.on_state(spec.name, State.FAILED, life.how)
            raise ChildFailed(spec.name, life.how, life.last_lines, CONFIG_EXIT_CODE if hopeless else 1)

    async def _live(self, spec: ChildSpec) -> _Life:
        """One life of the child, from its start to its end and that of its descendants."""
        self._listener.on_state(spec.name, State.STARTING, "")
        try:
            child = await self._start(spec)
        except OSError as error:
            raise ChildFailed(spec.name, str(error), (), 1) from error
        self._children[spec.name] = child
        try:
            async with asyncio.TaskGroup() as group:
                reader = group.create_task(child.read_lines(lambda line: self._on_line(spec.name, line)))
                prober = group.create_task(self._probe(spec, child))
                code = await child.wait()
                prober.cancel()
                child.signal_group(signal.SIGKILL)
                await asyncio.wait([reader], timeout=DRAIN_SECONDS)
                reader.cancel()
        finally:
            child.signal_group(signal.SIGKILL)
            await child.wait()
            del self._children[spec.name]
        overdue = not prober.cancelled() and prober.result() is None
        how = (
            f"not ready after {spec.start_seconds:g} s{' without progress' * spec.heeds_progress}"
            if overdue
            else describe_exit(code)
        )
        ready_at = None if prober.cancelled() else prober.result()
        ready_seconds = None if ready_at is None else time.monotonic() - ready_at
        return _Life(how, code, tuple(child.last_lines), ready_seconds)

    def _on_line(self, name: str, line: str) -> None:
        """One that stands still may say the same again."""
        if (found := PROGRESS.search(line)) and self._progress.get(name) != found[0]:
            self._progress[name] = found[0]
            for waiting, patience in self._patience.items():
                if not patience.expired():
                    patience.reschedule(asyncio.get_running_loop().time() + self._start_seconds[waiting])
        self._listener.on_line(name, line)

    async def _probe(self, spec: ChildSpec, child: Child) -> float | None:
        """When the child became ready; None after its time was over, and it with it."""
        try:
            async with asyncio.timeout(spec.start_seconds) as patience:
                if spec.heeds_progress:
                    self._patience[spec.name] = patience
                await _until(spec.probe)
        except TimeoutError:
            child.signal_group(signal.SIGKILL)
            return None
        finally:
            self._patience.pop(spec.name, None)
        self._ready[spec.name].set()
        self._listener.on_state(spec.name, State.READY, "")
        return time.monotonic()


async def _until(probe: Callable[[], Awaitable[bool]]) -> None:
    pause = 0.0
    while not await probe():
        # quick at first: most children are up within a second
        pause = min(MAX_PROBE_SECONDS, pause + 0.05)
        await asyncio.sleep(pause)
