"""KV transport for pools on the same machine: the kernel reads the peer's memory file, without network or peer.

Reads only the file of the peer's current process, and never writes or maps it, so its memory is freed when the peer
ends.
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
# Reading this much takes less time than starting a thread.
MAX_BYTES_AT_ONCE = 256 * 1024
OPEN_FILES = Path("/proc")
# Process, open file, and a name that no other file has.
FILE_NAME = re.compile(r"(\d+/fd/\d+) (/memfd:\S+-[0-9a-f]{32}\b.*)")


class LocalTransport:
    """For a pool in an open file of this process, as `create_shared_memory` makes it."""

    name = "local"

    def __init__(self, memory: BlockBytes) -> None:
        """Raises OSError if the system does not show open files."""
        assert memory.shared_fd is not None
        link = os.readlink(OPEN_FILES / "self" / "fd" / str(memory.shared_fd))
        self._file = f"{os.getpid()}/fd/{memory.shared_fd} {link}"
        self._address, size = memory.address, memory.num_blocks * memory.block_bytes
        self._pool = memoryview((ctypes.c_ubyte * size).from_address(memory.address)).cast("B")
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="near")

    def register(self, address: int, size_bytes: int) -> None:
        """Do nothing: the file is open."""

    def endpoint(self) -> Endpoint:
        """Return an endpoint for peers on this machine only."""
        return self.with_file(Endpoint(self.name, "", self._address))

    def with_file(self, endpoint: Endpoint) -> Endpoint:
        """Return another transport's endpoint of the same pool, plus this pool's file."""
        return replace(endpoint, file=self._file)

    def reaches(self, peer: Endpoint) -> bool:
        """True if the peer runs on this machine under the same user and shares /proc."""
        match = FILE_NAME.fullmatch(peer.file)
        if match is None:
            return False
        with suppress(OSError):
            return os.readlink(OPEN_FILES / match[1]) == match[2]
        return False

    async def connect(self, peer: Endpoint) -> None:
        """Do nothing: opening the file is part of a pull."""

    async def pull(self, source: KvSource, runs: Sequence[CopyRange], timeout_seconds: float) -> None:
        """Implements Transport.pull. A frozen or ending peer has no effect."""
        deadline = time.monotonic() + timeout_seconds
        if sum(run.size_bytes for run in runs) <= MAX_BYTES_AT_ONCE:
            self._read(source.endpoint, runs, deadline)
        else:
            await asyncio.get_running_loop().run_in_executor(self._threads, self._read, source.endpoint, runs, deadline)

    async def close(self) -> None:
        """Wait for running reads, then stop the threads."""
        await asyncio.to_thread(self._threads.shutdown, wait=True, cancel_futures=True)

    def _read(self, peer: Endpoint, runs: Sequence[CopyRange], deadline: float) -> None:
        try:
            with _opened(peer.file) as file:
                for run in coalesce(runs):
                    at, offset = run.local_address - self._address, run.remote_address - peer.pool_address
                    if min(at, offset) < 0 or at + run.size_bytes > len(self._pool):
                        raise OSError("a range exceeds the pool")
                    _fill(file, offset, self._pool[at : at + run.size_bytes], deadline)
        except OSError as error:
            raise TransferFailed(f"reading {peer.file!r}: {error}") from error


@contextmanager
def _opened(name: str) -> Iterator[int]:
    """Open the file. Raises OSError if it is gone or is another file by now."""
    match = FILE_NAME.fullmatch(name)
    if match is None:
        raise OSError("the name is not a pool's file")
    file = os.open(OPEN_FILES / match[1], os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.readlink(OPEN_FILES / "self" / "fd" / str(file)) != match[2]:
            raise OSError("the descriptor belongs to another file now")
        yield file
    finally:
        os.close(file)


def _fill(file: int, offset: int, target: memoryview, deadline: float) -> None:
    done = 0
    while done < len(target):
        if time.monotonic() > deadline:
            raise OSError("the deadline passed")
        part = target[done : done + MAX_READ_BYTES]
        count = os.preadv(file, [part], offset + done)
        if count == 0:
            raise OSError("the file ends before the block")
        done += count
