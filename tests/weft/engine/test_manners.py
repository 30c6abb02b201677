"""The thread that computes gives way; those that only answer do not."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.weft.engine.harness import Driver
from tests.weft.tiny_llama import Tiny


def niceness(thread: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, thread)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells threads apart")
def test_the_engines_thread_is_nice_and_nobody_else_in_the_process(grouped: Tiny) -> None:
    usual = niceness(threading.get_native_id())
    with Driver(grouped, niceness=7) as driver:
        assert driver.generate([1, 2, 3], 4).tokens == grouped.greedy([1, 2, 3], 4)
        (engine,) = [thread for thread in threading.enumerate() if thread.name == "weft-engine"]
        assert engine.native_id is not None
        assert niceness(engine.native_id) == min(usual + 7, 19)
    assert niceness(threading.get_native_id()) == usual


AUTOGROUP = Path("/proc/self/autogroup")


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this kernel does not deal out cores by session")
@pytest.mark.parametrize("leads", [True, False])
def test_only_who_leads_a_session_makes_it_nice(leads: bool) -> None:
    code = f"from weft.engine.manners import let_sessions_pass as p; p(7); print(open('{AUTOGROUP}').read())"
    # the one that does not lead is in a session of its parent's, which is not the tests' own either
    command = [sys.executable, "-c", code] if leads else ["sh", "-c", f'"$0" -c "{code}"; true', sys.executable]
    output = subprocess.check_output(command, text=True, start_new_session=True, timeout=60)
    assert output.split()[-1] == ("7" if leads else "0")
