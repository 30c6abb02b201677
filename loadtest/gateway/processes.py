"""Processes of a benchmark: started, waited for, their CPU time read, ended. Knows nothing of what they do."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from types import TracebackType
from typing import Self

import httpx
import psutil

from weft.cli.child import die_with

START_SECONDS, STOP_SECONDS = 120.0, 10.0


class NoStart(Exception):
    """A process does not come up; the message has the end of its log."""


class Processes:
    """Started by `start`, all ended with the block."""

    def __init__(self) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (lives as long as the processes)
        self._all: list[psutil.Popen] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in reversed(self._all):
            trees = [process, *_children(process)]
            with contextlib.suppress(psutil.Error):
                process.terminate()
            for straggler in psutil.wait_procs(trees, STOP_SECONDS)[1]:
                with contextlib.suppress(psutil.Error):
                    straggler.kill()
        self._log.close()

    def start(
        self, command: Sequence[str], environment: Mapping[str, str] | None = None, cores: Set[int] = frozenset()
    ) -> psutil.Popen:
        """In a process group of its own, so that a Ctrl-C is ours to tell. It ends when this process does, even if that
        is killed. `cores`: those it keeps to; none: any."""
        parent, keep = os.getpid(), keep_to(cores) or (lambda: None)

        def before_exec() -> None:
            keep()
            die_with(parent, signal.SIGTERM)

        process = psutil.Popen(
            command,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
            preexec_fn=before_exec,
        )
        self._all.append(process)
        return process

    def wait(self, what: str, is_there: Callable[[], bool], seconds: float = START_SECONDS) -> None:
        """Until it is. Raises NoStart after so many seconds, or when one of the processes has ended."""
        deadline = time.monotonic() + seconds
        while not is_there():
            ended = [process for process in self._all if not _is_running(process)]
            if ended or time.monotonic() > deadline:
                self._log.seek(0)
                raise NoStart(f"{what}: not there\n{self._log.read()[-3000:]}")
            time.sleep(0.1)


def keep_to(cores: Set[int]) -> Callable[[], None] | None:
    """What a process does between fork and exec to stay on these cores, with all threads that it will have."""
    return partial(os.sched_setaffinity, 0, cores) if cores else None


def cpu_seconds(processes: Iterable[psutil.Process]) -> float:
    """User and system time of these and of what they have started."""
    total = 0.0
    for process in processes:
        for each in (process, *_children(process)):
            with contextlib.suppress(psutil.Error):
                times = each.cpu_times()
                total += float(times.user + times.system)
    return total


def answers(port: int, path: str) -> Callable[[], bool]:
    """Does this URL say 200."""

    def is_there() -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=5).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    return is_there


def counter(port: int, name: str) -> float:
    """The sum of a Prometheus counter over its labels, as the process that serves it has it now."""
    told = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    return sum(map(float, re.findall(rf"^{name}_total(?:{{[^}}]*}})? (\S+)$", told, re.MULTILINE)))


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children(recursive=True))
    except psutil.Error:
        return []


def _is_running(process: psutil.Process) -> bool:
    return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
