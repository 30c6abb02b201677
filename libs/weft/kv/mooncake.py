"""Pulls through Mooncake's Transfer Engine, peer to peer: the peer's name is its handshake listener's host:port.

The library blocks its threads and spins while it waits, so it gets a few of its own. A transfer that it reports as
failed may still write afterwards.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from weft.kv.transport import Endpoint, Lender, Run, TransferFailed, coalesce

logger = logging.getLogger(__name__)
NUM_THREADS = 4
# beyond 1024 queued entries a peer the library fails the whole batch and lets it land later
MAX_BATCH_ENTRIES = 1024 // NUM_THREADS
MAX_BATCH_BYTES = 64 * 1024 * 1024
_ENVIRONMENT = {
    # seconds until a stuck transfer fails; the library takes no less than 5
    "MC_TRANSFER_TIMEOUT": "5",
    # without it every transfer leaves a socket in TIME_WAIT
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    "MC_LOG_LEVEL": "ERROR",
}


class MooncakeUnavailable(Exception):
    """The library cannot be loaded or started here; the message says why."""


class MooncakeTransport:
    """One Transfer Engine for the process. `host` is the address under which peers reach this machine."""

    name = "mooncake"

    def __init__(self, host: str, protocol: str = "tcp") -> None:
        for variable, value in _ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
        if protocol == "tcp":
            os.environ.setdefault("MC_FORCE_TCP", "1")
        try:
            # optional: three wheels share this name, and each needs libraries of the machine
            from mooncake.engine import TransferEngine
        except (ImportError, OSError) as error:
            raise MooncakeUnavailable(str(error)) from error
        self._engine = TransferEngine()
        with _held_stderr() as said:
            code = self._engine.initialize(host, "P2PHANDSHAKE", protocol, "")
            if code != 0:
                raise MooncakeUnavailable(f"initialize({host}, {protocol}) returned {code}: {said()}")
        self._segment = f"{host}:{self._engine.get_rpc_port()}"
        self._pool_address = 0
        self._opened: set[str] = set()
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="mooncake")

    def register(self, address: int, size_bytes: int) -> None:
        """Raises MooncakeUnavailable when the library refuses the memory."""
        if (code := self._engine.register_memory(address, size_bytes)) != 0:
            raise MooncakeUnavailable(f"register_memory({size_bytes} bytes) returned {code}")
        self._pool_address = address

    def endpoint(self) -> Endpoint:
        """What peers need."""
        return Endpoint(self.name, self._segment, self._pool_address)

    async def connect(self, peer: Endpoint) -> None:
        """Handshake beside the loop, so that the first pull does not wait for it."""
        if peer.segment not in self._opened:
            self._opened.add(peer.segment)
            # a frozen peer holds the probe for a minute: neither a pull nor our exit may wait for that
            threading.Thread(target=self._engine.send_probe, args=(peer.segment,), daemon=True).start()

    async def pull(self, lender: Lender, runs: Sequence[Run], timeout_seconds: float) -> None:
        """See Transport.pull."""
        deadline = time.monotonic() + timeout_seconds
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._threads, self._read_all, lender.endpoint.segment, coalesce(runs), deadline)

    def _read_all(self, segment: str, runs: Sequence[Run], deadline: float) -> None:
        for batch in batches(runs):
            if time.monotonic() > deadline:
                raise TransferFailed(f"pull from {segment} took too long", may_still_land=False)
            code = self._engine.batch_transfer_sync_read(
                segment,
                [run.local_address for run in batch],
                [run.remote_address for run in batch],
                [run.size_bytes for run in batch],
            )
            if code != 0:
                raise TransferFailed(f"mooncake read from {segment} returned {code}", may_still_land=True)

    async def close(self) -> None:
        """Wait for the threads, a stuck transfer's timeout at most, then give the memory back."""
        await asyncio.to_thread(self._threads.shutdown, wait=True, cancel_futures=True)
        if self._pool_address:
            self._engine.unregister_memory(self._pool_address)


@contextmanager
def _held_stderr() -> Iterator[Callable[[], str]]:
    """Keep what the library writes to stderr: it reports an error at every start that is none."""
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lambda: os.pread(file.fileno(), 2000, 0).decode(errors="replace")
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def batches(runs: Sequence[Run]) -> Iterator[list[Run]]:
    """Cut into batches of bounded length and bytes, order kept; a run larger than a batch is cut itself."""
    batch: list[Run] = []
    batch_bytes = 0
    for run in runs:
        for piece in _pieces(run):
            if batch and (len(batch) == MAX_BATCH_ENTRIES or batch_bytes + piece.size_bytes > MAX_BATCH_BYTES):
                yield batch
                batch, batch_bytes = [], 0
            batch.append(piece)
            batch_bytes += piece.size_bytes
    if batch:
        yield batch


def _pieces(run: Run) -> Iterator[Run]:
    for offset in range(0, run.size_bytes, MAX_BATCH_BYTES):
        size = min(MAX_BATCH_BYTES, run.size_bytes - offset)
        yield Run(run.remote_address + offset, run.local_address + offset, size)
