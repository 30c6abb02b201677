"""Fork server: a process with the workers' imports done, which forks a worker for each request; and its client.

The server is `python -m weft.cli.fork_server MODULE...` with a SOCK_SEQPACKET Unix socket as standard input. A request
is `{"module", "environ"}` with one file descriptor for the child's output; the child then runs as `python -m module`.
The server answers requests in order with `{"started": pid}`, 0 when the system cannot fork, and reports the end of a
child as `{"ended": pid, "code"}`. End of input ends the server, and its end kills its children. It has one thread, as a
fork copies no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
from collections import deque
from collections.abc import Mapping, Sequence

from weft.cli.child import Child, die_with, open_output

MAX_REQUEST_BYTES = 1 << 18
EVENT_BYTES = 4096
# The first spawn waits for the imports, on a busy machine too. After a timeout the supervisor starts the child itself.
SPAWN_TIMEOUT_SECONDS = 30.0


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
    signal.signal(signal.SIGCHLD, lambda *_: _reap(sock))
    server = os.getpid()
    while True:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        request, outputs, _, _ = socket.recv_fds(sock, MAX_REQUEST_BYTES, 1)
        if not request:
            return
        # the event of a child's end must follow that of its start
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        try:
            pid = _fork(server, outputs)
        except OSError:  # out of processes, descriptors or memory
            pid = 0
        if pid == os.getpid():
            return _run_module(**json.loads(request))
        _send(sock, started=pid)


def _fork(server: int, outputs: list[int]) -> int:
    """Return the child's pid, in both; the child leads its session by then, so that its group can be signalled."""
    if not outputs:
        raise OSError("the kernel drops a descriptor that exceeds RLIMIT_NOFILE")
    with open(outputs[0], "wb", buffering=0) as output:
        settled, is_settled = os.pipe()
        with open(settled, "rb", buffering=0) as reader, open(is_settled, "wb", buffering=0) as writer:
            if pid := os.fork():
                writer.close()
                reader.read(1)
                return pid
            try:
                os.setsid()
                die_with(server)
                with open(os.devnull, "r+b", buffering=0) as nothing:
                    os.dup2(nothing.fileno(), 0)
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
            except OSError:
                os._exit(1)
    return os.getpid()


def _reap(sock: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            _send(sock, ended=ended[0], code=os.waitstatus_to_exitcode(ended[1]))


def _send(sock: socket.socket, **event: int) -> None:
    sock.sendall(json.dumps(event).encode())


def _run_module(module: str, environ: dict[str, str]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    gc.enable()
    os.environ.clear()
    os.environ.update(environ)
    sys.argv[1:] = []
    runpy.run_module(module, run_name="__main__", alter_sys=True)


class ForkedProcess:
    """A forked process; implements the part of `asyncio.subprocess.Process` that a Child uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def wait(self) -> int:
        """Return the exit code, as the fork server reports it."""
        return await asyncio.shield(self.ended)

    def send_signal(self, number: int) -> None:
        """Raises ProcessLookupError when it has ended."""
        if self.ended.done():
            raise ProcessLookupError(self.pid)
        os.kill(self.pid, number)


class ForkServerClient:
    """A running fork server. Its children die with it; `is_open` is false once it no longer takes requests."""

    def __init__(self, process: asyncio.subprocess.Process, sock: socket.socket) -> None:
        self.is_open = True
        self._process = process
        self._socket = sock
        # spawns that wait for an answer, in the order of their requests
        self._pending: deque[asyncio.Future[ForkedProcess | None]] = deque()
        self._children: dict[int, ForkedProcess] = {}
        self._receiver = asyncio.create_task(self._receive_events())

    @classmethod
    async def open(cls, command: Sequence[str], environ: Mapping[str, str]) -> ForkServerClient:
        """Start the fork server, without waiting for its imports. Raises OSError when it cannot be started."""
        sock, inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.setblocking(False)
        parent = os.getpid()
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                # OpenBLAS must not start threads: a fork does not copy them
                env={**environ, "OPENBLAS_NUM_THREADS": "1"},
                stdin=inside.fileno(),
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                process_group=0,
                preexec_fn=lambda: die_with(parent),
            )
        except BaseException:
            sock.close()
            raise
        finally:
            inside.close()
        return cls(process, sock)

    async def spawn(self, request: bytes) -> Child | None:
        """Fork a child that leads a session. None if the server has ended, refuses, or does not answer in time."""
        if not self.is_open:
            return None
        read_end, write_end = os.pipe()
        asked: asyncio.Future[ForkedProcess | None] = asyncio.get_running_loop().create_future()
        forked = None
        try:
            socket.send_fds(self._socket, [request], [write_end])
            self._pending.append(asked)
            async with asyncio.timeout(SPAWN_TIMEOUT_SECONDS):
                forked = await asked
        except OSError:
            pass  # includes TimeoutError; _on_event kills a child that starts after it
        finally:
            os.close(write_end)
            if forked is None:
                os.close(read_end)
        return None if forked is None else Child(forked, await open_output(read_end))

    async def close(self) -> None:
        """Kill the fork server, and with it its children."""
        self._receiver.cancel()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        self._fail_pending()

    async def _receive_events(self) -> None:
        try:
            while event := await asyncio.get_running_loop().sock_recv(self._socket, EVENT_BYTES):
                self._on_event(**json.loads(event))
        except OSError:
            pass  # the same as the end of the server
        finally:
            self._fail_pending()  # no further event arrives: end the waits for one

    def _on_event(self, started: int = 0, ended: int = 0, code: int = 0) -> None:
        if ended:
            self._children.pop(ended).ended.set_result(code)
            return
        forked, asked = ForkedProcess(started) if started else None, self._pending.popleft()
        if forked is not None:
            self._children[started] = forked
        if not asked.cancelled():
            asked.set_result(forked)
        elif forked is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, as the next event will say
                forked.send_signal(signal.SIGKILL)

    def _fail_pending(self) -> None:
        self.is_open = False
        self._socket.close()
        for asked in self._pending:
            if not asked.done():
                asked.set_result(None)
        for forked in self._children.values():
            forked.ended.set_result(-signal.SIGKILL)
        self._pending.clear()
        self._children.clear()


if __name__ == "__main__":
    main()
