"""A spare process of the supervisor: it takes the place of the child that dies next."""

from __future__ import annotations

import asyncio
import signal
import sys
from functools import partial

from tests.weft.cli.test_supervisor import FOREVER, Recorder, gone, running, spec

from weft.cli.child import Child
from weft.cli.supervisor import RestartPolicy, State, Supervisor


async def another_spare(supervisor: Supervisor, than: Child | None) -> Child:
    async with asyncio.timeout(10):
        while True:
            if (spare := supervisor._spare) is not None and spare is not than:
                return spare
            await asyncio.sleep(0.01)


async def test_a_spare_becomes_the_child_that_died_and_another_takes_its_place() -> None:
    recorder = Recorder()
    waiter = f"import sys; print('became', sys.stdin.readline().strip(), flush=True); {FOREVER}"
    specs = [spec(recorder, name, FOREVER, order=f"{name}!\n".encode()) for name in ("one", "two")]
    policy = RestartPolicy(first_backoff=0.01, spare_after=0.0)
    supervisor = Supervisor(specs, recorder, policy, spare_command=(sys.executable, "-c", waiter))
    spare: Child | None = None
    async with running(supervisor):
        await supervisor.wait_ready()
        for name in ("one", "two"):
            spare = await another_spare(supervisor, spare)
            supervisor._children[name].signal_group(signal.SIGKILL)
            await recorder.until(partial(recorder.lines.__contains__, (name, f"became {name}!")))
            assert supervisor._children[name] is spare
        last = await another_spare(supervisor, spare)
    assert await gone(last.pid)


async def test_without_a_living_spare_a_child_is_started_as_usual() -> None:
    recorder = Recorder()
    supervisor = Supervisor(
        [spec(recorder, "one", f"import os; print(os.getpid(), flush=True); {FOREVER}", order=b"x\n")],
        recorder,
        RestartPolicy(first_backoff=0.01, spare_after=0.0),
        spare_command=(sys.executable, "-c", ""),
    )
    async with running(supervisor):
        await supervisor.wait_ready()
        spare = await another_spare(supervisor, None)
        await spare.wait()
        supervisor._children["one"].signal_group(signal.SIGKILL)
        await recorder.until(lambda: recorder.of("one").count(State.STARTING) == 2)
        await recorder.until(lambda: len([line for line in recorder.lines if line[1].isdecimal()]) == 2)


def has_become(recorder: Recorder, number: int) -> bool:
    return recorder.lines.count(("one", "became one!")) == number


async def test_where_a_spare_is_at_hand_nothing_waits_for_the_backoff() -> None:
    recorder = Recorder()
    waiter = f"import sys; print('became', sys.stdin.readline().strip(), flush=True); {FOREVER}"
    policy = RestartPolicy(first_backoff=60.0, max_backoff=60.0, spare_after=0.0)
    one = spec(recorder, "one", FOREVER, order=b"one!\n")
    supervisor = Supervisor([one], recorder, policy, spare_command=(sys.executable, "-c", waiter))
    spare: Child | None = None
    async with running(supervisor):
        await supervisor.wait_ready()
        for number in (1, 2):
            spare = await another_spare(supervisor, spare)
            supervisor._children["one"].signal_group(signal.SIGKILL)
            await recorder.until(partial(has_become, recorder, number))
