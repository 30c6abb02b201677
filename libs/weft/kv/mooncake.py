"""KV transport through Mooncake's Transfer Engine, peer to peer. A peer's name is host:port of its handshake listener.

Every range is its own transfer, submitted without waiting and polled until it has ended; only then does nothing write
any more. The library's blocking calls return at the first failure or timeout. Their remaining transfers landed up to 30
s later, when a frozen peer continued.

`python -m weft.kv.mooncake` loads all of Mooncake that Weft uses, or fails with the reason in its last line.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib.util
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from weft.kv.transfer import CopyRange, Endpoint, KvSource, TransferFailed, coalesce

logger = logging.getLogger(__name__)
# A hanging peer blocks only this many pulls of its own.
PULLS_PER_PEER = 2
# Beyond 1024 queued transfers to a peer, the library fails further ones.
MAX_IN_FLIGHT = 256
MAX_RUN_BYTES = 16 * 1024 * 1024
MAX_IN_FLIGHT_BYTES = 64 * 1024 * 1024
# Polling interval. Sleeping through a 1 ms transfer wakes up late; busy polling takes the CPU from the library's
# thread. So the first polls only yield, and later ones sleep as long as the bytes in flight take at the best rate.
# After 1 s without progress, sleep longer.
ASK_AT_ONCE_SECONDS = 0.001
SHORTEST_NAP_SECONDS, LONGEST_NAP_SECONDS, BEST_BYTES_PER_SECOND = 0.000002, 0.002, 8e9
LONG_NAP_SECONDS, LONG_AFTER_SECONDS = 0.01, 1.0
MAX_LANES = 64
PR_SET_TIMERSLACK = 29
SUCCEEDED, FAILED = 1, -1
_ENVIRONMENT = {
    # Seconds without a byte until the library closes a transfer's connection, which ends it.
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "5",
    "MC_TCP_STATUS_TIMEOUT_SEC": "5",
    # Without this, every transfer leaves a socket in TIME_WAIT.
    "MC_TCP_ENABLE_CONNECTION_POOL": "1",
    "MC_LOG_LEVEL": "ERROR",
}


class MooncakeUnavailable(Exception):
    """The library cannot be loaded or started; the message says why."""


class MooncakeTransport:
    """One Transfer Engine for the process. `host` is this machine's address for peers."""

    def __init__(self, host: str, protocol: str = "tcp") -> None:
        # A peer with RDMA cannot read from a peer with TCP or vice versa, so they are two transports.
        self.name = "mooncake" if protocol == "tcp" else f"mooncake_{protocol}"
        for variable, value in _ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
        if protocol == "tcp":
            os.environ.setdefault("MC_FORCE_TCP", "1")
        load_cuda_runtime()
        try:
            # Optional: three wheels share this name, and each needs system libraries.
            from mooncake.engine import TransferEngine
        except (ImportError, OSError) as error:
            raise MooncakeUnavailable(str(error)) from error
        self._engine: Any = TransferEngine()
        with _captured_stderr() as captured:
            code = self._engine.initialize(host, "P2PHANDSHAKE", protocol, "")
            if code != 0:
                raise MooncakeUnavailable(f"initialize({host}, {protocol}) returned {code}: {captured()}")
        self._segment = f"{host}:{self._engine.get_rpc_port()}"
        self._pool_address = 0
        self._opened: set[str] = set()
        self._peers: dict[str, _PeerThreads] = {}

    def register(self, address: int, size_bytes: int) -> None:
        """Register the pool. Raises MooncakeUnavailable if the library refuses the memory."""
        if (code := self._engine.register_memory(address, size_bytes)) != 0:
            raise MooncakeUnavailable(f"register_memory({size_bytes} bytes) returned {code}")
        self._pool_address = address

    def endpoint(self) -> Endpoint:
        """Return the segment name and pool address for peers."""
        return Endpoint(self.name, self._segment, self._pool_address)

    def reaches(self, peer: Endpoint) -> bool:
        """True if the peer uses Mooncake over the same protocol."""
        return peer.transport == self.name

    async def connect(self, peer: Endpoint) -> None:
        """Start the handshake in a thread, so that the first pull does not wait for it."""
        if peer.segment not in self._opened:
            self._opened.add(peer.segment)
            # A frozen peer blocks the probe for a minute; neither a pull nor process exit may wait for it.
            threading.Thread(target=self._engine.send_probe, args=(peer.segment,), daemon=True).start()

    async def pull(self, source: KvSource, ranges: Sequence[CopyRange], timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        segment = source.endpoint.segment
        peer_threads = self._peers.setdefault(segment, _PeerThreads())
        peer_threads.num_users += 1
        try:
            pull = Pull(self._engine, segment, coalesce(ranges), deadline)
            await asyncio.get_running_loop().run_in_executor(peer_threads.threads, pull.run)
        finally:
            peer_threads.num_users -= 1
            self._retire()

    def _retire(self) -> None:
        """Shut down idle threads above MAX_LANES peers, since peers come and go under new names."""
        idle = [segment for segment, peer_threads in self._peers.items() if not peer_threads.num_users]
        for segment in idle[: max(0, len(self._peers) - MAX_LANES)]:
            self._peers.pop(segment).threads.shutdown(wait=False)

    async def close(self) -> None:
        """Wait for running transfers, then release memory, threads and sockets."""
        for peer_threads in self._peers.values():
            await asyncio.to_thread(peer_threads.threads.shutdown, wait=True, cancel_futures=True)
        if self._pool_address:
            self._engine.unregister_memory(self._pool_address)
            self._pool_address = 0
        # The destructor takes a second in which no Python thread runs; do it now, not during a garbage collection.
        self._engine = None


class _PeerThreads:
    """Threads that read from one peer, so that a hanging peer blocks only its own."""

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(PULLS_PER_PEER, thread_name_prefix="mooncake", initializer=_set_timer_slack)
        self.num_users = 0


def _set_timer_slack() -> None:
    """Make this thread's sleeps precise: Linux adds up to 50 us, as long as a small transfer takes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1000)


class Pull:
    """Reads ranges from one peer with a bounded number of transfers. `run` blocks until the last one has ended."""

    def __init__(self, engine: Any, segment: str, ranges: Sequence[CopyRange], deadline: float) -> None:
        self._engine = engine
        self._segment = segment
        self._deadline = deadline
        self._waiting = deque(pieces(ranges))
        self._in_flight: dict[int, int] = {}  # transfer -> bytes, oldest first
        self._in_flight_bytes = 0
        self._trouble = ""

    def run(self) -> None:
        """Run to the end. Raises TransferFailed."""
        moved_at = time.monotonic()
        while self._submit():
            now = time.monotonic()
            if self._collect():
                moved_at = now
            else:
                self._wait(now - moved_at)
        if self._trouble:
            raise TransferFailed(f"mooncake read from {self._segment} {self._trouble}")

    def _submit(self) -> bool:
        """Start transfers within the bounds; False if none is in flight afterwards."""
        begin, waiting = self._engine.batch_transfer_async_read, self._waiting
        while waiting and not self._trouble and self._has_room(waiting[0]):
            if time.monotonic() > self._deadline:
                self._trouble = "took too long"
                break
            run = waiting.popleft()
            transfer = begin(self._segment, [run.local_address], [run.remote_address], [run.size_bytes])
            if transfer == 0:  # nothing was started
                self._trouble = "was refused"
                break
            self._in_flight[transfer] = run.size_bytes
            self._in_flight_bytes += run.size_bytes
        return bool(self._in_flight)

    def _collect(self) -> bool:
        """Remove ended transfers, oldest first; the first running one stops the scan. False if none has ended."""
        check, ended = self._engine.transfer_check_status, []
        for transfer in self._in_flight:
            status = check(transfer)
            if status not in (SUCCEEDED, FAILED):
                break
            if status == FAILED:
                self._trouble = self._trouble or "failed"
            ended.append(transfer)
        for transfer in ended:
            self._in_flight_bytes -= self._in_flight.pop(transfer)
        return bool(ended)

    def _wait(self, quiet_seconds: float) -> None:
        if quiet_seconds < ASK_AT_ONCE_SECONDS:
            os.sched_yield()
        elif quiet_seconds < LONG_AFTER_SECONDS:
            least = self._in_flight_bytes / BEST_BYTES_PER_SECOND
            time.sleep(min(max(least, SHORTEST_NAP_SECONDS), LONGEST_NAP_SECONDS))
        else:
            time.sleep(LONG_NAP_SECONDS)

    def _has_room(self, run: CopyRange) -> bool:
        is_within = self._in_flight_bytes + run.size_bytes <= MAX_IN_FLIGHT_BYTES
        return not self._in_flight or (len(self._in_flight) < MAX_IN_FLIGHT and is_within)


@contextmanager
def _captured_stderr() -> Iterator[Callable[[], str]]:
    """Capture the library's stderr: it reports a harmless error at every start."""
    kept = os.dup(2)
    with open(os.memfd_create("weft-stderr"), "rb") as file:  # A file on disk would need metadata reads.
        os.dup2(file.fileno(), 2)
        try:
            yield lambda: os.pread(file.fileno(), 2000, 0).decode(errors="replace")
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def pieces(ranges: Sequence[CopyRange]) -> Iterator[CopyRange]:
    """Yield the ranges in order, split to MAX_RUN_BYTES."""
    for run in ranges:
        if run.size_bytes <= MAX_RUN_BYTES:  # Nearly all: a new object costs as much as starting its transfer.
            yield run
            continue
        for offset in range(0, run.size_bytes, MAX_RUN_BYTES):
            size = min(MAX_RUN_BYTES, run.size_bytes - offset)
            yield CopyRange(run.remote_address + offset, run.local_address + offset, size)


def load_cuda_runtime() -> None:
    """Load the CUDA runtime if it exists. Mooncake's GPU wheels need it, and pip installs it where no loader looks.

    torch loads it too. If Mooncake needs a missing one, importing Mooncake reports it.
    """
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec and spec.submodule_search_locations) or ():
        for library in sorted(Path(folder).glob("*/lib/libcudart.so.*")):
            with suppress(OSError):
                ctypes.CDLL(str(library))


def main() -> None:
    """Load Mooncake as a worker and its store process do. Raises ImportError or OSError."""
    load_cuda_runtime()
    from mooncake.engine import TransferEngine as _Engine
    from mooncake.store import MooncakeDistributedStore as _Store

    _ = _Engine, _Store


if __name__ == "__main__":
    main()
