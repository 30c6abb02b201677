"""Children that are forked from a process that has done their imports: what they are, how they end, and who notices."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest
from tests.weft.cli.test_supervisor import FOREVER, Recorder, gone, running, spec

from weft.cli.child import Child, RestartPolicy
from weft.cli.fork_server import ForkServerClient
from weft.cli.supervisor import Supervisor

FORK_SERVER = (sys.executable, "-m", "weft.cli.fork_server", "library")
PROGRAM = """
import gc, os, signal, sys, library
assert gc.isenabled() and gc.get_freeze_count() > 1000, "what the fork server imported is not looked at again"
print(__name__, sys.argv[1:], os.environ["WHO"], "OLD" in os.environ, os.getppid() == library.PID, flush=True)
print("up", flush=True)
if os.environ["WHO"] == "brief":
    sys.exit(7)
print(len(os.listdir("/proc/self/fd")), flush=True)
signal.pause()
"""

# the second fork fails, and the pipe of the third
REFUSING = """
import errno
calls, fork, pipe = [], os.fork, os.pipe

def refused_fork():
    calls.append("fork")
    if calls.count("fork") == 2: raise OSError(errno.EAGAIN, "no processes")
    return fork()

def refused_pipe():
    calls.append("pipe")
    if calls.count("pipe") == 3: raise OSError(errno.EMFILE, "no descriptors")
    return pipe()

os.fork, os.pipe = refused_fork, refused_pipe
"""


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """Of a library and a program of the test's own."""
    (tmp_path / "library.py").write_text("import os; PID = os.getpid()")
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "__init__.py").write_text("")
    (tmp_path / "program" / "__main__.py").write_text(PROGRAM)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "OLD": "1"}


def fork_request(who: str) -> bytes:
    return json.dumps({"module": "program", "environ": {"WHO": who}}).encode()


@asynccontextmanager
async def fork_server(environ: dict[str, str]) -> AsyncIterator[ForkServerClient]:
    opened = await ForkServerClient.open(FORK_SERVER, environ)
    try:
        async with asyncio.timeout(30):
            yield opened
    finally:
        await opened.close()


async def spawned(opened: ForkServerClient, who: str) -> Child:
    child = await opened.spawn(fork_request(who))
    assert child is not None
    return child


async def heard_out(*children: Child) -> None:
    """Their output is closed: read to its end, which comes with theirs."""
    for child in children:
        await child.read_lines(lambda _: None)


async def test_a_child_is_the_module_and_knows_nothing_of_its_siblings(environ: dict[str, str]) -> None:
    async with fork_server(environ) as opened:
        children = {who: await spawned(opened, who) for who in ("one", "two", "brief")}
        assert await children["brief"].wait() == 7
        for who, child in children.items():
            assert who == "brief" or os.getsid(child.pid) == os.getpgid(child.pid) == child.pid
            lines: list[str] = []
            said = asyncio.Event()

            def hear(line: str, lines: list[str] = lines, said: asyncio.Event = said) -> None:
                lines.append(line)
                if len(lines) == 3:
                    said.set()

            reading = asyncio.create_task(child.read_lines(hear))
            if who != "brief":
                await said.wait()
                child.signal_group(signal.SIGKILL)
                assert await child.wait() == -signal.SIGKILL
            await reading
            # the last one: input, two outputs, and the directory that is being listed
            assert lines == [f"__main__ [] {who} False True", "up", *(["4"] if who != "brief" else [])]


async def test_when_it_dies_its_children_die_and_it_cannot_be_asked(environ: dict[str, str]) -> None:
    async with fork_server(environ) as opened:
        child = await spawned(opened, "one")
        os.kill(psutil.Process(child.pid).ppid(), signal.SIGKILL)
        assert await child.wait() == -signal.SIGKILL
        assert await gone(child.pid)
        assert not opened.is_open
        assert await opened.spawn(fork_request("two")) is None
        await heard_out(child)


async def test_spawn_times_out_and_late_child_is_killed(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fork_server(environ) as opened:
        child = await spawned(opened, "one")
        server = psutil.Process(psutil.Process(child.pid).ppid())
        server.suspend()
        with monkeypatch.context() as patch:
            patch.setattr("weft.cli.fork_server.SPAWN_TIMEOUT_SECONDS", 0.2)
            assert await opened.spawn(fork_request("late")) is None
        server.resume()
        later = await spawned(opened, "later")  # news come in fork_request: the late one has been born by now
        (late,) = {each.pid for each in server.children()} - {child.pid, later.pid} or {0}
        assert not late or await gone(late)
    await heard_out(child, later)


async def test_refused_fork_leaves_other_children_running(environ: dict[str, str], tmp_path: Path) -> None:
    with (tmp_path / "library.py").open("a") as library:
        library.write(REFUSING)
    async with fork_server(environ) as opened:
        child = await spawned(opened, "one")
        assert await opened.spawn(fork_request("no fork")) is None
        assert await opened.spawn(fork_request("no descriptor")) is None
        later = await spawned(opened, "later")
        assert psutil.pid_exists(child.pid)
    await heard_out(child, later)


async def test_one_that_cannot_import_bears_nobody(environ: dict[str, str]) -> None:
    opened = await ForkServerClient.open((*FORK_SERVER, "no.such.library"), environ)
    async with asyncio.timeout(30):
        assert await opened.spawn(fork_request("one")) is None
        await opened.close()


def has_said(recorder: Recorder, times: int) -> bool:
    return recorder.lines.count(("one", "up")) == times


async def test_a_dead_child_is_forked_again_at_once_and_nothing_stays(environ: dict[str, str]) -> None:
    recorder = Recorder()
    policy = RestartPolicy(first_backoff=60.0, max_backoff=60.0, healthy_if_forked=0.0)
    one = spec(recorder, "one", FOREVER, environ=environ, fork_request=fork_request("one"))
    supervisor = Supervisor([one], recorder, policy, fork_server_command=FORK_SERVER)
    async with running(supervisor):
        await supervisor.wait_ready()
        for number in (2, 3):
            supervisor._children["one"].signal_group(signal.SIGKILL)
            await recorder.until(partial(has_said, recorder, number))
        pid = supervisor._children["one"].pid
        server = psutil.Process(pid).ppid()
    assert [line for _, line in recorder.lines].count("__main__ [] one False True") == 3
    assert await gone(pid)
    assert await gone(server)


async def test_without_a_standby_process_a_child_is_started_by_itself(environ: dict[str, str]) -> None:
    recorder = Recorder()
    one = spec(
        recorder, "one", f"import os; print(os.getppid(), flush=True); {FOREVER}", fork_request=fork_request("one")
    )
    supervisor = Supervisor([one], recorder, fork_server_command=(sys.executable, "-c", ""))
    async with running(supervisor):
        await supervisor.wait_ready()
        await recorder.until(partial(recorder.lines.__contains__, ("one", str(os.getpid()))))
