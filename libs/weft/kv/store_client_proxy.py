"""Parent side of `store_client_process`: starts it, calls it without blocking the event loop, ends it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import mmap
import os
import socket
import subprocess
import sys
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass

from weft.kv.parent_death import inherit_autogroup

logger = logging.getLogger(__name__)
MAX_PENDING = 256
MAX_LINE_BYTES = 1024 * 1024
START_SECONDS = 15.0
PROBE_KEY = "weft/probe"
NO_SPACE = -200  # Mooncake's code; it starts to evict after this answer


class StoreLost(Exception):
    """The store cannot be used now; the message says why."""


class StoreBusy(StoreLost):
    """Too many calls are pending; that says nothing about the store's health."""


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """Address and memory of the store client.

    - `host`: this machine's address for peers.
    - `segment_bytes`: memory lent to the store; 0 for none.
    - `pool_fd`: file of `pool_bytes` bytes from which blocks can be put directly.
    """

    master: str
    host: str
    protocol: str
    segment_bytes: int = 0
    staging_bytes: int = 0
    pool_fd: int | None = None
    pool_bytes: int = 0


class StoreClientProxy:
    """A running store client process. Not restarted: after StoreLost or TimeoutError, leave its scope and enter
    another.

    Calls of one operation run in order, calls of different operations concurrently.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, staging: mmap.mmap | None) -> None:
        self._reader = reader
        self._writer = writer
        self._staging = staging
        # by operation, each with its own queue
        self._pending: defaultdict[str, deque[asyncio.Future[list[int]]]] = defaultdict(deque)
        self._lost = ""

    @classmethod
    @asynccontextmanager
    async def running(cls, spec: StoreSpec) -> AsyncIterator[StoreClientProxy]:
        """Yield a proxy for the length of the scope; no transfer outlives it. Raises StoreLost."""
        async with _process(spec) as (ours, staging):
            proxy = cls(*await asyncio.open_connection(sock=ours, limit=MAX_LINE_BYTES), staging)
            ready = proxy._expect("setup")
            listening = asyncio.create_task(proxy._listen())
            try:
                await proxy._until(ready, spec.master)
                yield proxy
            finally:
                listening.cancel()
                await asyncio.wait({listening})
                proxy._writer.close()

    @property
    def is_running(self) -> bool:
        """True until the process is found to have ended."""
        return not self._lost

    @property
    def staging(self) -> memoryview:
        """The area that `get` writes, and that `put` reads unless it reads the pool."""
        assert self._staging is not None
        return memoryview(self._staging)

    async def exist(self, keys: Sequence[str], timeout_seconds: float) -> list[bool]:
        """Return which keys are in the store; a found key stays there for some seconds.

        Raises StoreLost, also if the master does not answer, StoreBusy, or TimeoutError.
        """
        return [code == 1 for code in await self._look_up("exist", keys, timeout_seconds)]

    async def probe(self, timeout_seconds: float) -> None:
        """Check that the master answers, independent of queued lookups. Raises StoreLost or TimeoutError."""
        await self._look_up("probe", [PROBE_KEY], timeout_seconds)

    async def remove(self, keys: Sequence[str]) -> list[int]:
        """Remove keys; return one code a key, 0 for success. Keys that may be in use stay.

        Raises StoreLost; slow if the store is frozen.
        """
        return await self._call("remove", {"keys": list(keys)})

    async def put(self, keys: Sequence[str], offsets: Sequence[int], size: int, from_pool: bool = False) -> list[int]:
        """Store bytes at these offsets of the staging area or the pool; return one code a key, 0 for success.

        Raises StoreLost; slow if the store is frozen. The bytes may be read until the reply arrives or the scope ends.
        """
        area = "pool" if from_pool else "staging"
        return await self._call("put", {"area": area, "keys": list(keys), "offsets": list(offsets), "size": size})

    def get(self, keys: Sequence[str], offsets: Sequence[int], size: int) -> asyncio.Future[list[int]]:
        """Copy into the staging area; the future yields one code a key (`size` for success) or StoreLost.

        Starts at once and cannot be cancelled: these parts of the area may be written until the reply arrives. Slow if
        the store is frozen.
        """
        return self._ask("get", {"keys": list(keys), "offsets": list(offsets), "size": size})

    async def _until(self, ready: asyncio.Future[list[int]], master: str) -> None:
        try:
            async with asyncio.timeout(START_SECONDS):
                await asyncio.shield(ready)
        except TimeoutError:
            raise StoreLost(f"the store at {master} did not answer in {START_SECONDS:.0f} s") from None

    async def _look_up(self, operation: str, keys: Sequence[str], timeout_seconds: float) -> list[int]:
        async with asyncio.timeout(timeout_seconds):
            codes = await self._call(operation, {"keys": list(keys)})
        if any(code < 0 for code in codes):
            raise StoreLost(f"the store's master does not answer: {min(codes)}")
        return codes

    async def _call(self, operation: str, request: dict[str, object]) -> list[int]:
        # A cancelled caller must not take its reply's place out of the queue.
        return await asyncio.shield(self._ask(operation, request))

    def _ask(self, operation: str, request: dict[str, object]) -> asyncio.Future[list[int]]:
        if len(self._pending[operation]) >= MAX_PENDING:
            raise StoreBusy("too many pending calls to the store")
        reply = self._expect(operation)
        if not reply.done():
            self._writer.write(json.dumps({"op": operation, **request}).encode() + b"\n")
        return reply

    def _expect(self, operation: str) -> asyncio.Future[list[int]]:
        reply: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        # The failure may have no reader left; retrieve it to avoid a warning.
        reply.add_done_callback(lambda done: done.exception())
        if self._lost:
            reply.set_exception(StoreLost(self._lost))
        else:
            self._pending[operation].append(reply)
        return reply

    async def _listen(self) -> None:
        """Resolve replies; those of one operation arrive in request order."""
        try:
            while line := await self._reader.readline():
                message = json.loads(line)
                if "error" in message:
                    self._lost = message["error"]
                    break
                self._pending[message["op"]].popleft().set_result(message["codes"])
        finally:
            self._lost = self._lost or "the store process has ended"
            for waiting in self._pending.values():
                while waiting:
                    waiting.popleft().set_exception(StoreLost(self._lost))


@asynccontextmanager
async def _process(spec: StoreSpec) -> AsyncIterator[tuple[socket.socket, mmap.mmap | None]]:
    """Yield our end of the socket and the staging area of a new process; kill it at the end of the scope.

    It has nothing to save, and a clean shutdown of its library takes a second.
    """
    staging, files = None, {} if spec.pool_fd is None else {"pool_fd": spec.pool_fd}
    with ExitStack() as ours_to_close:
        try:
            with ExitStack() as childs:
                ours, theirs = socket.socketpair()
                ours_to_close.callback(ours.close)
                childs.callback(theirs.close)
                if spec.staging_bytes:
                    # Anonymous memory, freed with the last of the two processes.
                    files["staging_fd"] = os.memfd_create("weft-store-staging")
                    childs.callback(os.close, files["staging_fd"])
                    os.ftruncate(files["staging_fd"], spec.staging_bytes)
                    staging = mmap.mmap(files["staging_fd"], spec.staging_bytes)
                process = _spawn(spec, theirs, files)
        except OSError as error:
            raise StoreLost(f"the store process cannot start: {error}") from error
        try:
            yield ours, staging
        finally:
            process.kill()
            await asyncio.to_thread(process.wait)


def _spawn(spec: StoreSpec, theirs: socket.socket, files: dict[str, int]) -> subprocess.Popen[bytes]:
    """Start it by subprocess, which forks without gRPC's fork handlers."""
    arguments = {"parent_pid": os.getpid(), **dataclasses.asdict(spec), **files}
    process = subprocess.Popen(
        [sys.executable, "-m", "weft.kv.store_client_process", json.dumps(arguments)],
        stdin=theirs.fileno(),
        stdout=theirs.fileno(),
        # The library's own lines would flood the log; errors come back as codes.
        stderr=None if logger.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL,
        pass_fds=tuple(files.values()),
        # Ctrl-C in the terminal is for the parent.
        start_new_session=True,
    )
    inherit_autogroup(process.pid)
    return process
