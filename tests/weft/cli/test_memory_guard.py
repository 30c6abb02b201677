"""A child that takes more memory than was planned is logged, and ended before it takes the machine."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from tests.weft.cli.test_supervisor import QUICK, Recorder, running, spec

from weft.capacity.layout import GIB
from weft.cli import memory_guard
from weft.cli.memory_guard import MIB, MemoryGuard, MemoryPlan, anonymous_bytes, least_left_bytes
from weft.cli.supervisor import Supervisor

# it grows without end, by what one page in each chunk takes, and reaches the bound within a few steps
GREEDY = """
import time
print('up', flush=True)
held = []
while True:
    held.append(bytearray(b'x') * (8 << 20))
    time.sleep(0.02)
"""
SHARING = """
import mmap, time
held = mmap.mmap(-1, 256 << 20)
for start in range(0, len(held), 1 << 20):
    held[start : start + (1 << 20)] = bytes(1 << 20)
print('up', flush=True)
time.sleep(600)
"""
MODEST = "import time; held = bytearray(b'x') * (32 << 20); print('up', flush=True); time.sleep(600)"


class Machine:
    """What a guard measures."""

    def __init__(self, planned: int) -> None:
        self.used, self.left = 0, 64 * GIB
        self.lines: list[str] = []
        self.guard = MemoryGuard(MemoryPlan(planned), self.lines.append, lambda pid: self.used, lambda: self.left)

    def look(self, used: int) -> str:
        self.used = used
        self.guard.look(7)
        return self.guard.verdict


@pytest.mark.parametrize("planned", [GIB, 100 * GIB], ids=["small", "large"])
def test_guard_ends_what_is_far_beyond_its_plan(planned: int) -> None:
    machine = Machine(planned)
    assert not machine.look(planned)
    assert not machine.lines
    assert not machine.look(planned * 2)
    assert "memory beyond plan used_mib=" in machine.lines[-1]
    assert machine.look(planned * 3 + 5 * GIB)
    assert machine.lines[-1].startswith("memory far beyond plan, process is ended used_mib=")


def test_guard_ends_less_when_the_machine_runs_out() -> None:
    machine = Machine(10 * GIB)
    machine.left = least_left_bytes() - 1
    assert not machine.look(10 * GIB), "what was planned may be taken to the last byte"
    assert machine.look(14 * GIB)


def test_guard_logs_each_growth_once() -> None:
    machine = Machine(GIB)
    for used in (2, 2, 1, 2, 2):
        machine.look(used * GIB)
    assert len(machine.lines) == 2


async def test_guard_without_a_plan_returns() -> None:
    await asyncio.wait_for(MemoryGuard(MemoryPlan(), print).watch(None), 5)  # type: ignore[arg-type]


@contextmanager
def started(program: str) -> Iterator[int]:
    """The number of a process that has said "up" and leads a group."""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_memory_counts_descendants_and_no_shared_memory() -> None:
    family = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {MODEST!r}]).wait()"
    with started(family) as parent, started(SHARING) as sharing:
        assert anonymous_bytes(parent) > 32 * MIB
        assert anonymous_bytes(sharing) < 128 * MIB


def test_memory_of_a_process_that_ended_is_nothing() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert anonymous_bytes(ended.pid) == 0


async def test_supervisor_starts_greedy_child_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_guard, "HARD_EXTRA_BYTES", 64 * MIB)
    monkeypatch.setattr(memory_guard, "PERIOD_SECONDS", 0.05)
    recorder = Recorder()
    specs = [
        spec(recorder, "greedy", GREEDY, memory_bytes=32 * MIB),
        spec(recorder, "modest", MODEST, memory_bytes=64 * MIB),
    ]
    async with running(Supervisor(specs, recorder, QUICK)):
        await recorder.until(lambda: len(recorder.deaths) > 1)
    assert {name for name, *_ in recorder.deaths} == {"greedy"}
    assert recorder.deaths[0][1].startswith("memory: ")
    assert any("memory beyond plan" in line for name, line in recorder.lines if name == "greedy")
