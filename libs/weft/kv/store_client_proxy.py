"""The parent's side of a `store_process`: starts it, talks to it without blocking the loop, ends it.

Knows keys and offsets in the memory that both see, not what blocks mean nor which are worth keeping.
"""

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
NO_SPACE = -200  # Mooncake's code; it begins to evict when it has answered so


class StoreLost(Exception):
    """The store cannot be used now; the message says why."""


class StoreBusy(StoreLost):
    """Too much has been asked of it already; that says nothing of its health."""


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """Where the store is. `host` is this machine as its peers reach it; 0 `segment_bytes` lends the store no memory.

    `pool_fd`: a file of `pool_bytes` bytes that blocks can be put from as they lie.
    """

    master: str
    host: str
    protocol: str
    segment_bytes: int = 0
    staging_bytes: int = 0
    pool_fd: int | None = None
    pool_bytes: int = 0


class StoreClientProxy:
    """A running store process. Not restarted: after StoreLost or TimeoutError leave its scope and enter another.

    Calls of one operation go one after the other, those of different ones beside each other.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, staging: mmap.mmap | None) -> None:
        self._reader = reader
        self._writer = writer
        self._staging = staging
        # by operation: each has a line of its own
        self._pending: defaultdict[str, deque[asyncio.Future[list[int]]]] = defaultdict(deque)
        self._lost = ""

    @classmethod
    @asynccontextmanager
    async def running(cls, spec: StoreSpec) -> AsyncIterator[StoreClientProxy]:
        """An agent for the length of a scope, which no transfer outlives. Raises StoreLost."""
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
        """Has it not been found to have ended."""
        return not self._lost

    @property
    def staging(self) -> memoryview:
        """The area that `get` writes and `put` reads, unless it reads the pool."""
        assert self._staging is not None
        return memoryview(self._staging)

    async def exist(self, keys: Sequence[str], timeout_seconds: float) -> list[bool]:
        """Which keys are in the store now; a positive answer keeps them there for some seconds.

        Raises StoreLost, also when the master does not answer, StoreBusy, or TimeoutError.
        """
        return [code == 1 for code in await self._look_up("exist", keys, timeout_seconds)]

    async def probe(self, timeout_seconds: float) -> None:
        """Does the master answer; in a line of its own, which is not longer where much is looked up.

        Raises StoreLost or TimeoutError.
        """
        await self._look_up("probe", [PROBE_KEY], timeout_seconds)

    async def remove(self, keys: Sequence[str]) -> list[int]:
        """Take them out of the store; one code a key, 0 is success. Those that somebody may be reading stay.

        Raises StoreLost; slow when the store is frozen.
        """
        return await self._call("remove", {"keys": list(keys)})

    async def put(self, keys: Sequence[str], offsets: Sequence[int], size: int, from_pool: bool = False) -> list[int]:
        """Store what lies at these offsets of the staging area, or of the pool; one code a key, 0 is success.

        Raises StoreLost; slow when the store is frozen. Until the reply is here, or the agent's scope has ended, these
        bytes may be read.
        """
        area = "pool" if from_pool else "staging"
        return await self._call("put", {"area": area, "keys": list(keys), "offsets": list(offsets), "size": size})

    def get(self, keys: Sequence[str], offsets: Sequence[int], size: int) -> asyncio.Future[list[int]]:
        """Copy into the staging area; one code a key, `size` is success, or StoreLost; slow when the store is frozen.

        Begun at once, and not to be cancelled: until the reply is here, these parts of the area may be written.
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
        # a caller that leaves must not take the place of its reply out of the row
        return await asyncio.shield(self._ask(operation, request))

    def _ask(self, operation: str, request: dict[str, object]) -> asyncio.Future[list[int]]:
        if len(self._pending[operation]) >= MAX_PENDING:
            raise StoreBusy("too many calls are waiting for the store")
        reply = self._expect(operation)
        if not reply.done():
            self._writer.write(json.dumps({"op": operation, **request}).encode() + b"\n")
        return reply

    def _expect(self, operation: str) -> asyncio.Future[list[int]]:
        reply: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        # nobody may be left to hear of a failure
        reply.add_done_callback(lambda done: done.exception())
        if self._lost:
            reply.set_exception(StoreLost(self._lost))
        else:
            self._pending[operation].append(reply)
        return reply

    async def _listen(self) -> None:
        """Replies to one operation come in the order of its requests."""
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
    """A store process, our end of its line and the staging area; killed and gone at the end of the scope.

    Killed, not asked: it has nothing to save, and its library takes a second to say goodbye.
    """
    staging, files = None, {} if spec.pool_fd is None else {"pool_fd": spec.pool_fd}
    with ExitStack() as ours_to_close:
        try:
            with ExitStack() as childs:
                ours, theirs = socket.socketpair()
                ours_to_close.callback(ours.close)
                childs.callback(theirs.close)
                if spec.staging_bytes:
                    # memory without a name: gone with the last of the two processes
                    files["staging_fd"] = os.memfd_create("weft-store-staging")
                    childs.callback(os.close, files["staging_fd"])
                    os.ftruncate(files["staging_fd"], spec.staging_bytes)
                    staging = mmap.mmap(files["staging_fd"], spec.staging_bytes)
                process = _spawn(spec, theirs, files)
        except OSError as error:
            raise StoreLost(f"no store process can be started: {error}") from error
        try:
            yield ours, staging
        finally:
            process.kill()
            await asyncio.to_thread(process.wait)


def _spawn(spec: StoreSpec, theirs: socket.socket, files: dict[str, int]) -> subprocess.Popen[bytes]:
    """By subprocess, which forks without running gRPC's fork handlers."""
    arguments = {"parent_pid": os.getpid(), **dataclasses.asdict(spec), **files}
    process = subprocess.Popen(
        [sys.executable, "-m", "weft.kv.store_client_process", json.dumps(arguments)],
        stdin=theirs.fileno(),
        stdout=theirs.fileno(),
        # the library's own lines would drown the log; what matters comes back as codes
        stderr=None if logger.isEnabledFor(logging.DEBUG) else subprocess.DEVNULL,
        pass_fds=tuple(files.values()),
        # a Ctrl-C in the terminal is for the parent to act on
        start_new_session=True,
    )
    inherit_autogroup(process.pid)
    return process
