"""KV transfers: messages between prefill and decode, access to pool bytes, and transports.

A transport only pulls: no peer writes into our pool. LocalTransport serves pools on one machine: the kernel reads the
peer's memory file, without network or peer. It reads only the file of the peer's current process, and never writes or
maps it, so that memory is freed when the peer ends. `weft.rpc.wire` encodes the messages.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import xxhash

from weft.kv.layer_groups import Unit
from weft.request import KEEP, ModelFingerprint, PositionLogprobs, RequestKey, Retention, SamplingParams

# Messages that each side sends in the time of a lease, which is the silence that ends a transfer.
HEARTBEATS_PER_LEASE = 3
NUM_THREADS = 4
MAX_READ_BYTES = 16 * 1024 * 1024
# Reading this much takes less time than starting a thread.
MAX_BYTES_AT_ONCE = 256 * 1024
HASH_MASK = (1 << 64) - 1
OPEN_FILES = Path("/proc")
# Process, open file, and a name that no other file has.
FILE_NAME = re.compile(r"(\d+/fd/\d+) (/memfd:\S+-[0-9a-f]{32}\b.*)")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """How to reach a peer's pool.

    - `segment`: the transport's own name for the peer; empty for gRPC.
    - `file`: the pool's file for processes on the peer's machine, independent of the transport; empty without one.
    """

    transport: str
    segment: str
    pool_address: int
    file: str = ""


@dataclass(frozen=True, slots=True)
class KvSource:
    """Where to pull from: the peer's pool, its gRPC listener, and the lease that allows reading."""

    endpoint: Endpoint
    address: str
    lease: RequestKey


@dataclass(frozen=True, slots=True)
class CopyRange:
    """Bytes to copy from `remote_address` in the peer's memory to `local_address` in ours."""

    remote_address: int
    local_address: int
    size_bytes: int


class TransferFailed(Exception):
    """A pull that did not complete. It has ended: nothing is written any more."""


class Transport(Protocol):
    """One kind of transfer. Prefill registers and advertises its pool; decode pulls."""

    @property
    def name(self) -> str:
        """Metric label: "local", "mooncake", "mooncake_rdma" or "grpc"."""

    def register(self, address: int, size_bytes: int) -> None:
        """Make our pool readable by peers and writable by our own pulls. Called once at start."""

    def endpoint(self) -> Endpoint:
        """Return the address that peers need to pull from us."""

    def reaches(self, peer: Endpoint) -> bool:
        """True if this transport can read from there. Does not wait for the peer."""

    async def connect(self, peer: Endpoint) -> None:
        """Connect ahead of need. Never raises: a dead peer shows at the first pull."""

    async def pull(self, source: KvSource, runs: Sequence[CopyRange], timeout_seconds: float) -> None:
        """Copy all ranges, or raise TransferFailed.

        Returns or raises only once nothing can be written any more, which may be much later than the timeout. Blocks
        are reused on that guarantee. Cancelling does not stop the transfer: run it in its own task and await that with
        your own timeout.
        """

    async def close(self) -> None:
        """Unregister the pool and release resources."""


def coalesce(runs: Sequence[CopyRange]) -> list[CopyRange]:
    """Join ranges that are adjacent on both sides, in order."""
    joined: list[CopyRange] = []
    for run in runs:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.remote_address + last.size_bytes == run.remote_address
            and last.local_address + last.size_bytes == run.local_address
        ):
            joined[-1] = CopyRange(last.remote_address, last.local_address, last.size_bytes + run.size_bytes)
        else:
            joined.append(run)
    return joined


class BlockBytes(Protocol):
    """Pool bytes for transports and checks; the engine does not use it."""

    @property
    def address(self) -> int:
        """Address of the pool's first byte."""

    @property
    def block_bytes(self) -> int:
        """Size of one block in bytes."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the pool."""

    @property
    def units(self) -> tuple[tuple[Unit, ...], ...]:
        """The units of a page of each group, for checksums."""

    @property
    def shared_fd(self) -> int | None:
        """Open file that starts with the pool's bytes, for other processes to map; None without one."""

    @property
    def is_host(self) -> bool:
        """True for host memory. Device copies wait and should run in a thread."""

    def copy_out(self, blocks: Sequence[int], area: memoryview) -> None:
        """Copy blocks one after another into an area of their size; complete on return."""

    def copy_in(self, area: memoryview, blocks: Sequence[int]) -> None:
        """Copy an area back into blocks."""

    def read(self, block: int) -> memoryview:
        """Return the current bytes of one block."""

    def write(self, block: int, offset_bytes: int, data: bytes) -> None:
        """Overwrite part of one block. Raises ValueError if it would exceed the block."""


class HostBlocks:
    """A pool in this process' memory; `read` copies nothing."""

    is_host = True

    def __init__(
        self,
        address: int,
        block_bytes: int,
        num_blocks: int,
        shared_fd: int | None = None,
        units: tuple[tuple[Unit, ...], ...] = (),
    ) -> None:
        """`units`: a page is one unit if they are not given."""
        self.address = address
        self.shared_fd = shared_fd
        self.units = units or whole_page(block_bytes)
        self.block_bytes = block_bytes
        self.num_blocks = num_blocks
        whole = (ctypes.c_ubyte * (block_bytes * num_blocks)).from_address(address)
        self._bytes = memoryview(whole).cast("B")

    def read(self, block: int) -> memoryview:
        """Return a view of the block, not a copy."""
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"no block {block} in a pool of {self.num_blocks}")
        return self._bytes[block * self.block_bytes : (block + 1) * self.block_bytes]

    def copy_out(self, blocks: Sequence[int], area: memoryview) -> None:
        for slot, block in enumerate(blocks):
            area[slot * self.block_bytes : (slot + 1) * self.block_bytes] = self.read(block)

    def copy_in(self, area: memoryview, blocks: Sequence[int]) -> None:
        for slot, block in enumerate(blocks):
            self.read(block)[:] = area[slot * self.block_bytes : (slot + 1) * self.block_bytes]

    def write(self, block: int, offset_bytes: int, data: bytes) -> None:
        if offset_bytes < 0 or offset_bytes + len(data) > self.block_bytes:
            raise ValueError(f"{len(data)} bytes at {offset_bytes} leave a block of {self.block_bytes}")
        self.read(block)[offset_bytes : offset_bytes + len(data)] = data


def whole_page(block_bytes: int) -> tuple[tuple[Unit, ...], ...]:
    """Return the units of a pool with pages of one group that are not divided."""
    return ((Unit(0, block_bytes, 0),),)


def checksum(page: memoryview, units: Sequence[Unit]) -> int:
    """Return the sum of all units' xxh3_64, modulo 2^64; the number of a unit is its seed.

    So ranks with a share of the units add their sums, and two units in each other's place change the sum.
    """
    hashes = [xxhash.xxh3_64_intdigest(page[unit.offset : unit.offset + unit.size], unit.number) for unit in units]
    return sum(hashes) & HASH_MASK


def checksums(memory: BlockBytes, blocks: Sequence[int], groups: Sequence[int]) -> list[int]:
    """Return the checksum of each block, a page of its group, at about 10 GB/s; use a thread above 1 MB."""
    pages = zip(blocks, groups, strict=True)
    return [checksum(memory.read(block), memory.units[group]) for block, group in pages]


def object_checksum(page: memoryview | bytes) -> int:
    """Return the checksum of a page in the store and on its disk: xxh3_64 of all bytes.

    kvstore compares it too, and does not know the heads of a page. So this is not the sum that hand-offs compare.
    """
    return xxhash.xxh3_64_intdigest(page)


def is_superseded(key: RequestKey, living: Iterable[RequestKey]) -> bool:
    """True if a later attempt at the same request is running: this message is late and must change nothing."""
    return any(key.request_id == other.request_id and key.generation < other.generation for other in living)


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """First message of decode: compute this prompt; the first `held_blocks` blocks need not be transferred.

    - `resumed_tokens`: trailing tokens that an earlier attempt generated.
    - `lease_ms`: decode's own lease, valid until Accepted names the peer's; 0 if unknown.
    - `is_bare`: decode does not use its draft model, so the prompt need not fill the draft layer.
    """

    key: RequestKey
    prefill_boot_id: str
    fingerprint: ModelFingerprint
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: bytes = b""
    held_blocks: int = 0
    resumed_tokens: int = 0
    priority: int = 0
    retention: Retention = KEEP
    lease_ms: int = 0
    is_bare: bool = False


@dataclass(frozen=True, slots=True)
class Accepted:
    """The prompt is admitted. The lease has started and ends after `lease_ms` without a message from decode."""

    boot_id: str
    endpoint: Endpoint
    lease_ms: int


@dataclass(frozen=True, slots=True)
class ReadyBlocks:
    """Final blocks of a layer group, from prompt position `first_index` on, in the prefill worker's pool."""

    first_index: int
    blocks: tuple[int, ...]
    checksums: tuple[int, ...] = ()
    group: int = 0


@dataclass(frozen=True, slots=True)
class PromptFinished:
    """The prompt is computed: first token and counts.

    `bare_tokens`: prompt tokens up to the last one without KV of the draft layer.
    """

    first_token_id: int
    logprobs: PositionLogprobs | None
    cached_tokens: int
    store_tokens: int
    queue_ms: int
    compute_ms: int
    bare_tokens: int = 0


@dataclass(frozen=True, slots=True)
class LeaseClosed:
    """Last message of prefill: whether every block stayed in place for the whole lease."""

    lease_held: bool


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The prefill worker is alive, and its engine's thread advances."""


PrefillEvent = Accepted | ReadyBlocks | PromptFinished | LeaseClosed | Heartbeat


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
