"""Keeps a set of child processes running: starts them by dependency, restarts dead ones with backoff, stops them all.

A Listener receives every change of state. Runs on one event loop.

    waiting -> starting -> ready -> backing off -> starting ...
                   \\-> backing off                  \\-> failed (stops everything, if it has never been ready)
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from weft.cli.child import (
    CONFIG_EXIT_CODE,
    Child,
    ChildFailed,
    ChildSpec,
    ChildState,
    Listener,
    RestartPolicy,
    describe_exit,
)
from weft.cli.fork_server import ForkServerClient
from weft.cli.memory import MemoryGuard
from weft.log import PROGRESS

MAX_PROBE_SECONDS = 0.25
# part of the 5 s that Ctrl-C may take
STOP_SECONDS = 4.0
# the share of STOP_SECONDS reserved for each tier below the one that stops now
LEAST_TIER_SECONDS = 0.5
# how long to read the output of a killed process group
DRAIN_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class _Life:
    how: str
    # None: it could not be started
    code: int | None
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
        fork_server_command: Sequence[str] = (),
    ) -> None:
        """`fork_server_command` starts the fork server for children that have a `fork_request`."""
        self._specs = tuple(specs)
        self._fork_server_command = tuple(fork_server_command)
        self._fork_server: ForkServerClient | None = None
        self._listener = listener
        self._policy = policy or RestartPolicy()
        self._ready = {spec.name: asyncio.Event() for spec in specs}
        self._start_seconds = {spec.name: spec.start_seconds for spec in specs}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._children: dict[str, Child] = {}
        # start timeouts of children that heed progress and are not ready; the last progress line of each child
        self._patience: dict[str, asyncio.Timeout] = {}
        self._progress: dict[str, str] = {}
        self._stopping = False
        self._failure: ChildFailed | None = None
        self._has_failed = asyncio.Event()

    @property
    def was_ready(self) -> bool:
        """True once every child has been ready."""
        return all(event.is_set() for event in self._ready.values())

    async def wait_ready(self) -> None:
        """Wait until every child has been ready once."""
        for event in self._ready.values():
            await event.wait()

    async def run(self) -> None:
        """Keep all children running until `stop` or cancellation, and leave no process behind.

        Raises ChildFailed after stopping the other children.
        """
        try:
            self._fork_server = await self._start_fork_server()
            if self._stopping:
                return  # `stop` was called before there was a child to end
            async with asyncio.TaskGroup() as group:
                for spec in self._specs:
                    self._keepers[spec.name] = group.create_task(self._keep(spec))
                stopping = group.create_task(self._stop_after_failure())
                await asyncio.wait(self._keepers.values())
                stopping.cancel()
        finally:
            if self._fork_server is not None:
                await self._fork_server.close()
        if self._failure is not None:
            raise self._failure

    async def _stop_after_failure(self) -> None:
        """Stop the others. A task of its own, as `stop` cancels the keeper that failed."""
        await self._has_failed.wait()
        await self.stop()

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

    async def _start_fork_server(self) -> ForkServerClient | None:
        environ = next((spec.environ for spec in self._specs if spec.fork_request), None)
        if environ is None or not self._fork_server_command:
            return None
        try:
            return await ForkServerClient.open(self._fork_server_command, environ)
        except OSError:
            return None  # every child can be started by itself

    async def _start(self, spec: ChildSpec) -> Child:
        """Start the child, by the fork server if possible. Raises OSError."""
        forked = await self._fork_server.spawn(spec.fork_request) if self._fork_server and spec.fork_request else None
        return forked or await Child.start(spec.command, spec.environ, spec.leads_session)

    def _was_healthy(self, spec: ChildSpec, life: _Life) -> bool:
        """Return whether the child was ready long enough to forget its earlier failures."""
        is_forked = self._fork_server is not None and self._fork_server.is_open and bool(spec.fork_request)
        enough = self._policy.healthy_if_forked if is_forked else self._policy.healthy
        return life.ready_seconds is not None and life.ready_seconds >= enough

    async def _keep(self, spec: ChildSpec) -> None:
        for name in spec.after:
            await self._ready[name].wait()
        failures = 0
        while True:
            life = await self._live(spec)
            if self._stopping:
                self._listener.on_state(spec.name, ChildState.STOPPED, life.how)
                return
            failures = 0 if self._was_healthy(spec, life) else failures + 1
            if (why := self._hopeless(spec, life, failures)) is not None:
                self._listener.on_state(spec.name, ChildState.FAILED, life.how)
                self._failure = why
                self._has_failed.set()
                return
            # restart a healthy child at once
            pause = self._policy.backoff(failures) if failures else 0.0
            self._listener.on_death(spec.name, life.how, life.last_lines, pause)
            self._listener.on_state(spec.name, ChildState.BACKING_OFF, life.how)
            await asyncio.sleep(pause)

    def _hopeless(self, spec: ChildSpec, life: _Life, failures: int) -> ChildFailed | None:
        """Return the failure if another start would not help.

        Never for a child that has been ready: its settings were good, and missing memory, disks or files may come back.
        """
        is_wrong = life.code == CONFIG_EXIT_CODE
        if self._ready[spec.name].is_set():
            return None
        if is_wrong or life.code is None or failures >= self._policy.max_first_failures:
            return ChildFailed(spec.name, life.how, life.last_lines, CONFIG_EXIT_CODE if is_wrong else 1)
        return None

    async def _live(self, spec: ChildSpec) -> _Life:
        """Run the child from its start until it and its descendants have ended."""
        self._listener.on_state(spec.name, ChildState.STARTING, "")
        try:
            child = await self._start(spec)
        except OSError as error:
            return _Life(str(error), None, (), None)
        self._children[spec.name] = child
        guard = MemoryGuard(spec.memory_bytes, lambda line: self._listener.on_line(spec.name, line))
        try:
            async with asyncio.TaskGroup() as group:
                reader = group.create_task(child.read_lines(lambda line: self._on_line(spec.name, line)))
                prober = group.create_task(self._probe(spec, child))
                guarding = group.create_task(guard.watch(child))
                code = await child.wait()
                prober.cancel()
                guarding.cancel()
                child.signal_group(signal.SIGKILL)
                await asyncio.wait([reader], timeout=DRAIN_SECONDS)
                reader.cancel()
        finally:
            child.signal_group(signal.SIGKILL)
            await child.wait()
            del self._children[spec.name]
        overdue = not prober.cancelled() and prober.result() is None
        how = guard.verdict or (
            f"not ready after {spec.start_seconds:g} s{' without progress' * spec.heeds_progress}"
            if overdue
            else describe_exit(code)
        )
        ready_at = None if prober.cancelled() else prober.result()
        ready_seconds = None if ready_at is None else time.monotonic() - ready_at
        return _Life(how, code, tuple(child.last_lines), ready_seconds)

    def _on_line(self, name: str, line: str) -> None:
        """Pass on a line. New progress restarts the start timeouts; a repeated progress line does not."""
        if (found := PROGRESS.search(line)) and self._progress.get(name) != found[0]:
            self._progress[name] = found[0]
            for waiting, patience in self._patience.items():
                if not patience.expired():
                    patience.reschedule(asyncio.get_running_loop().time() + self._start_seconds[waiting])
        self._listener.on_line(name, line)

    async def _probe(self, spec: ChildSpec, child: Child) -> float | None:
        """Return when the child became ready; None after its start timeout, which kills it."""
        try:
            async with asyncio.timeout(spec.start_seconds) as patience:
                if spec.heeds_progress:
                    self._patience[spec.name] = patience
                was_ready = self._ready[spec.name].is_set()
                await _until(spec.probe_again if was_ready and spec.probe_again else spec.probe)
        except TimeoutError:
            child.signal_group(signal.SIGKILL)
            return None
        finally:
            self._patience.pop(spec.name, None)
        self._ready[spec.name].set()
        self._listener.on_state(spec.name, ChildState.READY, "")
        return time.monotonic()


async def _until(probe: Callable[[], Awaitable[bool]]) -> None:
    pause = 0.0
    while not await probe():
        # short pauses first: most children are ready within a second
        pause = min(MAX_PROBE_SECONDS, pause + 0.05)
        await asyncio.sleep(pause)
