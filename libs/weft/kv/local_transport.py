"""Pulls from a pool on the same machine: read out of its file by the kernel, with no network and no peer in between.

Only the lender's file of that very start is read, never written and never mapped: its memory goes when it ends.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from weft.kv.memory import BlockBytes
from weft.kv.transport import CopyRange, Endpoint, KvSource, TransferFailed, coalesce

NUM_THREADS = 4
MAX_READ_BYTES = 16 * 1024 * 1024
# so much is read before another thread would have begun
MAX_BYTES_AT_ONCE = 256 * 1024
OPEN_FILES = Path("/proc")
# a process, one of its open files, and the name that no other file has
FILE_NAME = re.compile(r"(\d+/fd/\d+) (/memfd:\S+-[0-9a-f]{32}\b.*)")


class LocalTransport:
    """For a pool that lies in an open file of this process, as `create_shared_memory` makes them."""

    name = "local"

    def __init__(self, memory: BlockBytes) -> None:
        """Raises OSError where the system does not show open files."""
        assert memory.shared_fd is not None
        link = os.readlink(OPEN_FILES / "self" / "fd" / str(memory.shared_fd))
        self._file = f"{os.getpid()}/fd/{memory.shared_fd} {link}"
        self._address, size = memory.address, memory.num_blocks * memory.block_bytes
        self._pool = memoryview((ctypes.c_ubyte * size).from_address(memory.address)).cast("B")
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="near")

    def register(self, address: int, size_bytes: int) -> None:
        """Nothing to register: the file is open."""

    def endpoint(self) -> Endpoint:
        """For peers on this machine alone."""
        return self.with_file(Endpoint(self.name, "", self._address))

    def with_file(self, endpoint: Endpoint) -> Endpoint:
        """Another transport's endpoint of the same pool, with the file in it for those who see it."""
        return replace(endpoint, file=self._file)

    def reaches(self, peer: Endpoint) -> bool:
        """Does the peer live on this machine, under the same user, and not apart in a container."""
        match = FILE_NAME.fullmatch(peer.file)
        if match is None:
            return False
        with suppress(OSError):
            return os.readlink(OPEN_FILES / match[1]) == match[2]
        return False

    async def connect(self, peer: Endpoint) -> None:
        """Nothing to connect."""

    async def pull(self, source: KvSource, runs: Sequence[CopyRange], timeout_seconds: float) -> None:
        """See Transport.pull. It waits for nobody: a lender that is frozen, or ends meanwhile, changes nothing."""
        deadline = time.monotonic() + timeout_seconds
        if sum(run.size_bytes for run in runs) <= MAX_BYTES_AT_ONCE:
            self._read(source.endpoint, runs, deadline)
        else:
            await asyncio.get_running_loop().run_in_executor(self._threads, self._read, source.endpoint, runs, deadline)

    async def close(self) -> None:
        """Wait for what is being read."""
        await asyncio.to_thread(self._threads.shutdown, wait=True, cancel_futures=True)

    def _read(self, peer: Endpoint, runs: Sequence[CopyRange], deadline: float) -> None:
        try:
            with _opened(peer.file) as file:
                for run in coalesce(runs):
                    at, offset = run.local_address - self._address, run.remote_address - peer.pool_address
                    if min(at, offset) < 0 or at + run.size_bytes > len(self._pool):
                        raise OSError("a run leaves the pool")
                    _fill(file, offset, self._pool[at : at + run.size_bytes], deadline)
        except OSError as error:
            raise TransferFailed(f"reading {peer.file!r}: {error}") from error


@contextmanager
def _opened(name: str) -> Iterator[int]:
    """Raises OSError when it is not there any more, or another one by now."""
    match = FILE_NAME.fullmatch(name)
    if match is None:
        raise OSError("that names no pool's file")
    file = os.open(OPEN_FILES / match[1], os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.readlink(OPEN_FILES / "self" / "fd" / str(file)) != match[2]:
            raise OSError("another file has its number")
        yield file
    finally:
        os.close(file)


def _fill(file: int, offset: int, target: memoryview, deadline: float) -> None:
    done = 0
    while done < len(target):
        if time.monotonic() > deadline:
            raise OSError("it took too long")
        part = target[done : done + MAX_READ_BYTES]
        count = os.preadv(file, [part], offset + done)
        if count == 0:
            raise OSError("the pool ends before the block")
        done += count
