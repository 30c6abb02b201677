"""Fork server: imports the modules that workers need once, then forks a child for each request.

Run `python -m weft.cli.fork_server MODULE...` with a SOCK_SEQPACKET Unix socket as standard input. A request is
`{"module", "environ"}` with one file descriptor for the child's output; the child then runs as `python -m module`.
Events: `{"started": pid}`, `{"ended": pid, "code"}`, and `{"refused": errno}` when the system cannot fork. End of
input ends the server, and the server's end kills its children. It has one thread, as a fork copies no other.
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

MAX_REQUEST_BYTES = 1 << 18


def main() -> None:
    """Import the modules of the command line, then serve fork requests and reap the children.

    Garbage collection is off during imports, where it takes a sixth of the time. Freezing the imported objects keeps
    collections in children from writing to their pages, so that the pages stay shared.
    """
    gc.disable()
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.freeze()
    sock = socket.socket(fileno=0)
    children: dict[int, int] = {}  # pid by pidfd, which becomes readable when the child ends
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    parent = os.getpid()
    while True:
        for fd, _ in poll.poll():
            if fd in children:
                poll.unregister(fd)
                os.close(fd)
                pid = children.pop(fd)
                _send(sock, ended=pid, code=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                continue
            request, outputs, _, _ = socket.recv_fds(sock, MAX_REQUEST_BYTES, 1)
            if not request:
                return
            try:
                pid, ending = _fork(parent, outputs, children)
            except OSError as error:  # out of processes, descriptors or memory
                _close(*outputs)
                _send(sock, refused=error.errno or errno.EAGAIN)
                continue
            if pid == 0:
                return _run_module(json.loads(request))
            _close(*outputs)
            children[ending] = pid
            poll.register(ending, select.POLLIN)
            _send(sock, started=pid)


def _fork(parent: int, outputs: list[int], inherited: Iterable[int]) -> tuple[int, int]:
    """Return the child's pid and its pidfd, or (0, -1) in the child. Raises OSError."""
    if not outputs:  # the kernel drops a descriptor that exceeds RLIMIT_NOFILE
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    settled, is_settled = os.pipe()
    try:
        pid = os.fork()
    except OSError:
        _close(settled, is_settled)
        raise
    if pid == 0:
        try:
            _set_up_child(parent, outputs[0], (settled, is_settled, *inherited))
        except OSError:
            os._exit(1)
        return 0, -1
    os.close(is_settled)
    os.read(settled, 1)  # returns at once when the child leads its session, so that its group can be signalled
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


def _send(sock: socket.socket, **what: int) -> None:
    sock.sendall(json.dumps(what).encode())


def _set_up_child(parent: int, output: int, inherited: Iterable[int]) -> None:
    """Start a session, redirect the output, and close every descriptor of the fork server."""
    os.setsid()
    die_with(parent)
    nothing = os.open(os.devnull, os.O_RDWR)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    for fd in (nothing, output, *inherited):
        os.close(fd)


def _run_module(request: dict[str, Any]) -> None:
    gc.enable()
    os.environ.clear()
    os.environ.update(request["environ"])
    sys.argv[1:] = []
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
