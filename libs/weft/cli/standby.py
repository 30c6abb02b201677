"""A process that has imported what workers need and forks them: a worker is there without importing anything.

`python -m weft.cli.standby MODULE...` with a Unix socket of packets as its standard input: {"module", "environ"}, with
the descriptor of an output, makes a child that is `python -m module`. It says who was born and how each ended, or why
the system refused one: those that live go on. The end of the input ends it, and its end that of its children. It has
one thread: others would not be there after a fork.
"""

from __future__ import annotations

import errno
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Iterable
from typing import Any

from weft.cli.child import die_with

MAX_ORDER_BYTES = 1 << 18


def main() -> None:
    """Import, then fork whoever is asked for, and bury them.

    What is imported is there to stay: to look for cycles in it would make up a sixth of the time that imports take, and
    in children touch every page of it, which then were theirs alone.
    """
    gc.disable()
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.freeze()
    door = socket.socket(fileno=0)
    living: dict[int, int] = {}  # process by a descriptor that becomes readable when it ends
    poll = select.poll()
    poll.register(door, select.POLLIN)
    parent = os.getpid()
    while True:
        for fd, _ in poll.poll():
            if fd in living:
                poll.unregister(fd)
                os.close(fd)
                pid = living.pop(fd)
                _say(door, ended=pid, code=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                continue
            order, outputs, _, _ = socket.recv_fds(door, MAX_ORDER_BYTES, 1)
            if not order:
                return
            try:
                pid, ending = _fork(parent, outputs, living)
            except OSError as error:  # no process, descriptor or memory to be had
                _close(*outputs)
                _say(door, refused=error.errno or errno.EAGAIN)
                continue
            if pid == 0:
                return _become(json.loads(order))
            _close(*outputs)
            living[ending] = pid
            poll.register(ending, select.POLLIN)
            _say(door, born=pid)


def _fork(parent: int, outputs: list[int], inherited: Iterable[int]) -> tuple[int, int]:
    """The child's number and a descriptor that tells of its end; 0 and none in the child. Raises OSError."""
    if not outputs:  # there was no descriptor left for it
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    settled, is_settled = os.pipe()
    try:
        pid = os.fork()
    except OSError:
        _close(settled, is_settled)
        raise
    if pid == 0:
        try:
            _settle(parent, outputs[0], (settled, is_settled, *inherited))
        except OSError:
            os._exit(1)
        return 0, -1
    os.close(is_settled)
    os.read(settled, 1)  # nothing, once it has a group: whoever hears of it may signal that
    os.close(settled)
    try:
        return pid, os.pidfd_open(pid)
    except OSError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _say(door: socket.socket, **what: int) -> None:
    door.sendall(json.dumps(what).encode())


def _settle(parent: int, output: int, inherited: Iterable[int]) -> None:
    """A session, an output and nothing else of its own."""
    os.setsid()
    die_with(parent)
    nothing = os.open(os.devnull, os.O_RDWR)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    for fd in (nothing, output, *inherited):
        os.close(fd)


def _become(order: dict[str, Any]) -> None:
    gc.enable()
    os.environ.clear()
    os.environ.update(order["environ"])
    sys.argv[1:] = []
    runpy.run_module(order["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
