"""The launcher of every benchmark: starts processes, waits for them, reads their CPU time and ends them."""

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
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
import psutil

from weft.cli.child import die_with

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS, STOP_SECONDS = 180.0, 20.0
LOG_CHARS = 4000


class BenchError(Exception):
    """A server does not start, does not come back or does not answer; the message says which and has its log's end."""


class Processes:
    """Processes that end with the block. Their output goes to `log_path`, or to a temporary file."""

    def __init__(self, log_path: Path | None = None) -> None:
        # it lives as long as the processes
        self._log = log_path.open("wb+") if log_path else tempfile.TemporaryFile("wb+")  # noqa: SIM115
        self._all: list[psutil.Popen] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._log.close()

    def stop(self) -> None:
        """End all processes and their descendants."""
        for process in reversed(self._all):
            tree = [process, *_children(process)]
            send_signal(process, signal.SIGTERM)
            for straggler in psutil.wait_procs(tree, STOP_SECONDS)[1]:
                send_signal(straggler, signal.SIGKILL)
        self._all.clear()

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        cores: Set[int] = frozenset(),
        folder: Path | None = None,
    ) -> psutil.Popen:
        """Start a command in a session of its own; it ends when this process does, even if that is killed.

        It keeps to `cores`, if any are given.
        """
        parent, keep = os.getpid(), keep_to(cores) or (lambda: None)

        def before_exec() -> None:
            keep()
            die_with(parent, signal.SIGTERM)

        process = psutil.Popen(
            command,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            cwd=folder,
            start_new_session=True,
            preexec_fn=before_exec,
        )
        self._all.append(process)
        return process

    def wait(self, what: str, is_there: Callable[[], bool], seconds: float = START_SECONDS) -> None:
        """Wait until `is_there`. Raises BenchError after `seconds`, or when one of the processes has ended."""
        deadline = time.monotonic() + seconds
        while not is_there():
            if time.monotonic() > deadline or not all(map(_is_running, self._all)):
                raise BenchError(f"{what} did not start:\n{self.log()[-LOG_CHARS:]}")
            time.sleep(0.1)

    def log(self) -> str:
        """Return the output so far; pread leaves the offset that the children share where it is."""
        file = self._log.fileno()
        return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")


def keep_to(cores: Set[int]) -> Callable[[], None] | None:
    """Return what a process calls between fork and exec to stay on these cores with all its threads."""
    return partial(os.sched_setaffinity, 0, cores) if cores else None


def send_signal(process: psutil.Process, number: int) -> None:
    """Send a signal to a process that may have ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def cpu_seconds(processes: Iterable[psutil.Process]) -> float:
    """Return the user and system time of these processes and their descendants."""
    total = 0.0
    for process in processes:
        for each in (process, *_children(process)):
            with contextlib.suppress(psutil.Error):
                times = each.cpu_times()
                total += float(times.user + times.system)
    return total


def main_thread_seconds(process: psutil.Process) -> float:
    """Return the CPU time of a process's first thread, to a microsecond; Linux only."""
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/schedstat").read_text().split()[0]) / 1e9


def answers(port: int, path: str) -> Callable[[], bool]:
    """Return a check whether a URL answers with 200."""

    def is_there() -> bool:
        try:
            return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=5).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    return is_there


def counter(port: int, name: str) -> float:
    """Return the sum of a Prometheus counter over its labels, as served at this port."""
    text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    return sum(map(float, re.findall(rf"^{name}_total(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)))


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children(recursive=True))
    except psutil.Error:
        return []


def _is_running(process: psutil.Process) -> bool:
    return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
