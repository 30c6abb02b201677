"""Client of the fork server: starts children with their imports done, and reports how they ended.

The supervisor uses such a child like one that it started itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections import deque
from collections.abc import Mapping, Sequence

from weft.cli.child import Child, die_with, open_output

EVENT_BYTES = 4096
# The first spawn waits for the imports, on a busy machine too. After a timeout the supervisor starts the child itself.
SPAWN_TIMEOUT_SECONDS = 30.0


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
        self._pending: deque[asyncio.Future[ForkedProcess]] = deque()
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
        asked: asyncio.Future[ForkedProcess] = asyncio.get_running_loop().create_future()
        try:
            socket.send_fds(self._socket, [request], [write_end])
            self._pending.append(asked)
            async with asyncio.timeout(SPAWN_TIMEOUT_SECONDS):
                forked = await asked
        except OSError:  # includes TimeoutError; _on_event kills a child that starts after it
            os.close(read_end)
            return None
        except asyncio.CancelledError:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        return Child(forked, await open_output(read_end))

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
                self._on_event(json.loads(event))
        except OSError:
            pass  # the same as the end of the server
        finally:
            self._fail_pending()  # no further event arrives: end the waits for one

    def _on_event(self, event: dict[str, int]) -> None:
        if "started" in event:
            forked = self._children[event["started"]] = ForkedProcess(event["started"])
            asked = self._pending.popleft()
            if asked.cancelled():
                with contextlib.suppress(ProcessLookupError):  # it has ended, as the next event will say
                    forked.send_signal(signal.SIGKILL)
            else:
                asked.set_result(forked)
        elif "refused" in event:
            if not (asked := self._pending.popleft()).cancelled():
                asked.set_exception(OSError(event["refused"], os.strerror(event["refused"])))
        else:
            self._children.pop(event["ended"]).ended.set_result(event["code"])

    def _fail_pending(self) -> None:
        self.is_open = False
        self._socket.close()
        for asked in self._pending:
            if not asked.done():
                asked.set_exception(ConnectionResetError("the process that forks has ended"))
        for forked in self._children.values():
            forked.ended.set_result(-signal.SIGKILL)
        self._pending.clear()
        self._children.clear()
