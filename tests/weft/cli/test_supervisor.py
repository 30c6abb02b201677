"""The supervisor over real processes: tiny Python programs that live, die, hang and have children of their own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from weft.cli import supervisor as module
from weft.cli.child import ChildFailed, ChildSpec, ChildState, RestartPolicy
from weft.cli.supervisor import Supervisor

QUICK = RestartPolicy(first_backoff=0.01, max_backoff=0.04, healthy=30.0, max_first_failures=5)
FOREVER = "import signal; print('up', flush=True); signal.pause()"
STUBBORN = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True)\nwhile True: signal.pause()"
)
FAMILY = f"""
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", {STUBBORN!r}]).pid, flush=True)
"""


class Recorder:
    """A listener that keeps everything and lets tests wait for it."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.states: list[tuple[str, ChildState]] = []
        self.deaths: list[tuple[str, str, tuple[str, ...], float]] = []
        self._changed = asyncio.Event()

    def on_line(self, name: str, line: str) -> None:
        self.lines.append((name, line))
        self._changed.set()

    def on_state(self, name: str, state: ChildState, detail: str) -> None:
        self.states.append((name, state))
        self._changed.set()

    def on_death(self, name: str, how: str, last_lines: Sequence[str], retry_seconds: float) -> None:
        self.deaths.append((name, how, tuple(last_lines), retry_seconds))
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def has_said(self, name: str, line: str) -> Callable[[], Awaitable[bool]]:
        """A probe: ready once the child wrote that line."""

        async def probe() -> bool:
            return (name, line) in self.lines

        return probe

    def of(self, name: str) -> list[ChildState]:
        return [state for who, state in self.states if who == name]


def spec(recorder: Recorder, name: str, program: str, **options: object) -> ChildSpec:
    values: dict[str, object] = {"environ": os.environ, "probe": recorder.has_said(name, "up"), **options}
    return ChildSpec(name=name, command=(sys.executable, "-c", program), **values)  # type: ignore[arg-type]


@asynccontextmanager
async def running(supervisor: Supervisor) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(supervisor.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def gone(pid: int) -> bool:
    """Does the process end soon; one that is only still listed counts as ended."""
    with contextlib.suppress(psutil.NoSuchProcess, TimeoutError):
        process = psutil.Process(pid)
        async with asyncio.timeout(10):
            while process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                await asyncio.sleep(0.01)
                process = psutil.Process(pid)
            return True
    return not psutil.pid_exists(pid)


async def test_children_start_when_those_they_need_are_ready() -> None:
    recorder = Recorder()
    specs = [spec(recorder, "late", FOREVER, after=("early",)), spec(recorder, "early", FOREVER)]
    supervisor = Supervisor(specs, recorder, QUICK)
    async with running(supervisor):
        await supervisor.wait_ready()
        assert recorder.states == [
            ("early", ChildState.STARTING),
            ("early", ChildState.READY),
            ("late", ChildState.STARTING),
            ("late", ChildState.READY),
        ]


async def test_a_mesh_that_is_ended_before_it_has_begun_starts_nobody() -> None:
    recorder = Recorder()
    supervisor = Supervisor([spec(recorder, "one", FOREVER)], recorder, QUICK)
    await supervisor.stop()  # while the process that forks is being started
    await asyncio.wait_for(supervisor.run(), 30)
    assert recorder.states == []


async def test_dead_child_is_reported_and_restarted_with_backoff() -> None:
    recorder = Recorder()
    program = "import sys; [print('line', i) for i in range(40)]; print('up', flush=True); sys.exit(7)"
    supervisor = Supervisor([spec(recorder, "one", program)], recorder, QUICK)
    async with running(supervisor):
        await recorder.until(lambda: len(recorder.deaths) == 4 or ChildState.FAILED in recorder.of("one"))
    name, how, last_lines, _ = recorder.deaths[0]
    assert (name, how) == ("one", "exit code 7")
    assert last_lines == (*(f"line {i}" for i in range(26, 40)), "up")
    assert [death[3] for death in recorder.deaths] == [0.01, 0.02, 0.04, 0.04]


async def test_a_killed_child_is_named_by_its_signal_and_comes_back() -> None:
    recorder = Recorder()
    supervisor = Supervisor(
        [spec(recorder, "one", f"import os; print(os.getpid(), flush=True); {FOREVER}")], recorder, QUICK
    )
    async with running(supervisor):
        await supervisor.wait_ready()
        os.kill(int(recorder.lines[0][1]), signal.SIGKILL)
        await recorder.until(lambda: recorder.of("one").count(ChildState.READY) == 2)
        assert recorder.deaths[0][1] == "killed by SIGKILL"


async def test_child_not_ready_in_time_is_restarted() -> None:
    recorder = Recorder()

    async def never() -> bool:
        return False

    supervisor = Supervisor([spec(recorder, "slow", FOREVER, probe=never, start_seconds=0.2)], recorder, QUICK)
    async with running(supervisor):
        await recorder.until(lambda: len(recorder.deaths) == 1)
    assert recorder.deaths[0][1] == "not ready after 0.2 s"


ADVANCING = """
import time
for done in range({count}):
    print(f"I weights progress weights: {{done * {step}}} of 100 MiB", flush=True)
    time.sleep({pause})
print("up", flush=True)
time.sleep(60)
"""


async def test_progress_extends_the_timeout_of_all_starts() -> None:
    recorder = Recorder()
    waiting = {"probe": recorder.has_said("loads", "up"), "start_seconds": 4.0, "heeds_progress": True}
    specs = [
        spec(recorder, "loads", ADVANCING.format(count=12, step=1, pause=0.5), **waiting),
        spec(recorder, "waits", FOREVER, **waiting),
    ]
    supervisor = Supervisor(specs, recorder, QUICK)
    async with running(supervisor):
        await recorder.until(lambda: supervisor.was_ready or bool(recorder.deaths))
    assert recorder.deaths == []


async def test_a_start_that_stands_still_is_ended_whatever_it_says() -> None:
    recorder = Recorder()
    program = ADVANCING.format(count=100, step=0, pause=0.1)
    specs = [spec(recorder, "stuck", program, start_seconds=0.5, heeds_progress=True)]
    async with running(Supervisor(specs, recorder, QUICK)):
        await recorder.until(lambda: bool(recorder.deaths))
    assert recorder.deaths[0][1] == "not ready after 0.5 s without progress"


async def test_stop_goes_from_the_highest_tier_to_the_lowest() -> None:
    recorder = Recorder()
    specs = [spec(recorder, f"tier{tier}", FOREVER, tier=tier) for tier in (0, 2, 1)]
    supervisor = Supervisor(specs, recorder, QUICK)
    async with running(supervisor) as task:
        await supervisor.wait_ready()
        await supervisor.stop()
        await task
    assert [name for name, state in recorder.states if state is ChildState.STOPPED] == ["tier2", "tier1", "tier0"]
    assert recorder.deaths == []


async def test_stop_kills_the_deaf_and_all_descendants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STOP_SECONDS", 0.3)
    recorder = Recorder()
    supervisor = Supervisor([spec(recorder, "family", FAMILY + STUBBORN)], recorder, QUICK)
    async with running(supervisor) as task:
        await recorder.until(lambda: [line for _, line in recorder.lines].count("up") == 2)
        grandchild = next(int(line) for _, line in recorder.lines if line != "up")
        await supervisor.stop()
        await task
    assert await gone(grandchild)


async def test_descendants_of_a_dead_child_do_not_outlive_it() -> None:
    recorder = Recorder()
    supervisor = Supervisor([spec(recorder, "family", FAMILY + "sys.exit(1)")], recorder, QUICK)
    async with running(supervisor):
        await recorder.until(lambda: len(recorder.deaths) == 1)
        assert await gone(int(recorder.deaths[0][2][0]))


async def test_stop_ends_a_backoff_at_once() -> None:
    recorder = Recorder()
    patient = RestartPolicy(first_backoff=1000.0, max_backoff=1000.0)
    supervisor = Supervisor([spec(recorder, "one", "import sys; sys.exit(1)")], recorder, patient)
    async with running(supervisor) as task:
        await recorder.until(lambda: ChildState.BACKING_OFF in recorder.of("one"))
        await supervisor.stop()
        async with asyncio.timeout(5):
            await task


async def test_long_and_broken_lines_come_through_in_pieces() -> None:
    recorder = Recorder()
    program = r"import os; os.write(1, b'x' * 100_000 + b'\n\xff\n\n  end\nup\n')"
    supervisor = Supervisor([spec(recorder, "one", program)], recorder, QUICK)
    async with running(supervisor):
        await recorder.until(lambda: len(recorder.deaths) >= 1)
    text = [line for _, line in recorder.lines]
    cut = text.index("\ufffd")
    assert "".join(text[:cut]) == "x" * 100_000
    assert text[cut : cut + 3] == ["\ufffd", "  end", "up"]


ORPHANED = """
import asyncio, os, sys
from weft.cli.child import Child

async def main():
    child = await Child.start((sys.executable, "-c", {program!r}), os.environ)
    print(child.pid, flush=True)
    await child.read_lines(lambda line: print(line, flush=True))

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's death signal is Linux's")
def test_children_die_when_their_supervisor_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "supervisor.py"
    script.write_text(ORPHANED.format(program=FOREVER))
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert process.stdout.readline() == "up\n"
        process.kill()
    assert asyncio.run(gone(child))


async def test_child_never_ready_is_given_up_after_five_deaths() -> None:
    recorder = Recorder()
    supervisor = Supervisor(
        [spec(recorder, "bad", "import sys; print('no luck'); sys.exit(1)"), spec(recorder, "good", FOREVER)],
        recorder,
        QUICK,
    )
    with pytest.raises(ChildFailed, match="bad: exit code 1") as failure:
        await supervisor.run()
    assert failure.value.exit_code == 1
    assert failure.value.last_lines == ("no luck",)
    assert recorder.of("bad").count(ChildState.STARTING) == 5


async def test_exit_status_2_before_ready_ends_the_mesh() -> None:
    recorder = Recorder()
    program = "import os, sys; print(os.getpid(), flush=True)\n"
    specs = [
        spec(recorder, "good", program + FOREVER),
        spec(recorder, "bad", "import sys; sys.exit('x' and 2)", after=("good",)),
    ]
    with pytest.raises(ChildFailed) as failure:
        await Supervisor(specs, recorder, QUICK).run()
    assert (failure.value.name, failure.value.exit_code) == ("bad", 2)
    assert recorder.deaths == []
    assert await gone(int(recorder.lines[0][1]))


async def test_child_that_was_ready_restarts_after_exit_status_2(tmp_path: Path) -> None:
    recorder = Recorder()
    program = f"""
import pathlib, signal, sys
been = pathlib.Path({str(tmp_path / "been")!r})
lives = len(been.read_text()) if been.exists() else 0
been.write_text("x" * (lives + 1))
if lives == 1:
    sys.exit(2)
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(2))
print('up', flush=True)
signal.pause()
"""
    supervisor = Supervisor([spec(recorder, "one", program)], recorder, QUICK)
    async with running(supervisor) as task:
        await supervisor.wait_ready()
        supervisor._children["one"].signal_group(signal.SIGUSR1)
        await recorder.until(lambda: task.done() or recorder.lines.count(("one", "up")) == 2)
        assert [how for _, how, _, _ in recorder.deaths] == ["exit code 2", "exit code 2"]
        assert not task.done()


async def test_child_that_was_ready_retries_a_failing_start(tmp_path: Path) -> None:
    recorder = Recorder()
    program = tmp_path / "program"
    program.symlink_to(sys.executable)
    one = spec(recorder, "one", FOREVER)
    one = dataclasses.replace(one, command=(str(program), *one.command[1:]))
    supervisor = Supervisor([one], recorder, QUICK)
    async with running(supervisor):
        await supervisor.wait_ready()
        program.unlink()
        supervisor._children["one"].signal_group(signal.SIGKILL)
        await recorder.until(lambda: len(recorder.deaths) == 3)
        program.symlink_to(sys.executable)
        await recorder.until(lambda: recorder.of("one").count(ChildState.READY) == 2)
    assert "No such file" in recorder.deaths[1][1]


async def test_those_beside_one_that_fails_are_stopped_as_by_hand() -> None:
    recorder = Recorder()
    tidy = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: print('tidied', flush=True) or sys.exit(0))\n"
    specs = [
        spec(recorder, "good", f"{tidy}print('up', flush=True); signal.pause()"),
        spec(recorder, "bad", "import sys; sys.exit(2)", after=("good",)),
        spec(recorder, "waits", FOREVER, after=("bad",)),
    ]
    with pytest.raises(ChildFailed, match="bad: exit code 2"):
        await Supervisor(specs, recorder, QUICK).run()
    assert ("good", "tidied") in recorder.lines
    assert ChildState.STARTING not in recorder.of("waits")


async def test_one_that_was_ready_may_be_asked_less_when_it_comes_back() -> None:
    recorder = Recorder()

    async def once() -> bool:
        return ChildState.READY not in recorder.of("one")

    async def always() -> bool:
        return True

    one = spec(recorder, "one", "import sys; sys.exit(0)", probe=once, probe_again=always)
    async with running(Supervisor([one], recorder, QUICK)):
        await recorder.until(lambda: recorder.of("one").count(ChildState.READY) == 2)


async def test_a_command_that_does_not_exist_ends_everything() -> None:
    recorder = Recorder()
    missing = ChildSpec("ghost", ("/nonexistent/program",), os.environ, recorder.has_said("ghost", "up"))
    with pytest.raises(ChildFailed, match=r"ghost: .*No such file"):
        await Supervisor([missing], recorder, QUICK).run()
