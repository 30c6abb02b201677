"""The thread that computes gives way; those that only answer do not."""

from __future__ import annotations

import os
import sys
import threading

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
