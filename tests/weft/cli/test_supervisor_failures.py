"""The supervisor where a child cannot be kept running: who is given up, who is tried again, what the others do."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from pathlib import Path

import pytest
from tests.weft.cli.test_supervisor import FOREVER, QUICK, Recorder, gone, running, spec

from weft.cli.child import ChildFailed, ChildSpec, ChildState
from weft.cli.supervisor import Supervisor


async def test_a_child_that_never_gets_ready_is_given_up_after_five_deaths() -> None:
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


async def test_exit_status_2_is_a_wrong_setting_and_ends_everything_at_once() -> None:
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


async def test_what_was_ready_once_is_tried_again_whatever_it_ends_with(tmp_path: Path) -> None:
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


async def test_what_was_ready_once_and_cannot_be_started_is_tried_again(tmp_path: Path) -> None:
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
