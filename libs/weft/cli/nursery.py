"""Children that are forked from one process which has done their imports (`weft.cli.standby`), and look like any other.

Knows how to ask for them and how they ended; what they are it passes on as it was given.
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

NEWS_BYTES = 4096
# for the imports before the first birth, on a busy machine too; after that a child is better started by itself
BIRTH_SECONDS = 30.0


class Forked:
    """A process whose parent tells how it ended: as much of `asyncio.subprocess.Process` as a Child needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def wait(self) -> int:
        """The exit code."""
        return await asyncio.shield(self.ended)

    def send_signal(self, number: int) -> None:
        """Raises ProcessLookupError when it has ended."""
        if self.ended.done():
            raise ProcessLookupError(self.pid)
        os.kill(self.pid, number)


class Nursery:
    """The process that forks. Its end is that of its children; `is_open` says whether it can still be asked."""

    def __init__(self, process: asyncio.subprocess.Process, door: socket.socket) -> None:
        self.is_open = True
        self._process = process
        self._door = door
        self._asked: deque[asyncio.Future[Forked]] = deque()
        self._living: dict[int, Forked] = {}
        self._hearing = asyncio.create_task(self._hear())

    @classmethod
    async def open(cls, command: Sequence[str], environ: Mapping[str, str]) -> Nursery:
        """Start it; it imports for a while. Raises OSError when it cannot be run."""
        door, inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        door.setblocking(False)
        parent = os.getpid()
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                # a thread of a library would not be there after a fork
                env={**environ, "OPENBLAS_NUM_THREADS": "1"},
                stdin=inside.fileno(),
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                process_group=0,
                preexec_fn=lambda: die_with(parent),
            )
        except BaseException:
            door.close()
            raise
        finally:
            inside.close()
        return cls(process, door)

    async def bear(self, order: bytes) -> Child | None:
        """A new child, leading a session; nothing when the process cannot be asked (any more) or does not answer."""
        if not self.is_open:
            return None
        read_end, write_end = os.pipe()
        asked: asyncio.Future[Forked] = asyncio.get_running_loop().create_future()
        try:
            socket.send_fds(self._door, [order], [write_end])
            self._asked.append(asked)
            async with asyncio.timeout(BIRTH_SECONDS):
                forked = await asked
        except OSError:  # TimeoutError is one; who is born afterwards is ended at once
            os.close(read_end)
            return None
        except asyncio.CancelledError:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        return Child(forked, await open_output(read_end))

    async def close(self) -> None:
        """End it, and whatever it has borne."""
        self._hearing.cancel()
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()
        self._lose()

    async def _hear(self) -> None:
        try:
            while news := await asyncio.get_running_loop().sock_recv(self._door, NEWS_BYTES):
                self._learn(json.loads(news))
        except OSError:
            pass  # as good as its end
        finally:
            self._lose()  # nobody waits for news that nobody hears

    def _learn(self, news: dict[str, int]) -> None:
        if "born" in news:
            forked = self._living[news["born"]] = Forked(news["born"])
            asked = self._asked.popleft()
            if asked.cancelled():
                with contextlib.suppress(ProcessLookupError):  # it has ended, of which the next news tell
                    forked.send_signal(signal.SIGKILL)
            else:
                asked.set_result(forked)
        elif "refused" in news:
            if not (asked := self._asked.popleft()).cancelled():
                asked.set_exception(OSError(news["refused"], os.strerror(news["refused"])))
        else:
            self._living.pop(news["ended"]).ended.set_result(news["code"])

    def _lose(self) -> None:
        self.is_open = False
        self._door.close()
        for asked in self._asked:
            if not asked.done():
                asked.set_exception(ConnectionResetError("the process that forks has ended"))
        for forked in self._living.values():
            forked.ended.set_result(-signal.SIGKILL)
        self._asked.clear()
        self._living.clear()
