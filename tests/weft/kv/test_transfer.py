"""Pool bytes, and the transport between pools of one machine."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from signal import SIGSTOP

import pytest
import torch
import xxhash

from weft.kv import transfer
from weft.kv.layer_groups import Unit
from weft.kv.memfd import SharedMemory, create_shared_memory
from weft.kv.transfer import (
    BlockBytes,
    CopyRange,
    Endpoint,
    HostBlocks,
    KvSource,
    LocalTransport,
    TransferFailed,
    checksum,
    checksums,
)
from weft.request import RequestKey
from weft.worker.pool_memory import TensorBlocks

BLOCK_BYTES, NUM_BLOCKS = 4096, 8
# block i of its pool is full of i + 1
LENDER = """
import ctypes, json, signal
from weft.kv.transfer import HostBlocks
from weft.kv.transfer import LocalTransport
from weft.kv.memfd import create_shared_memory
shared = create_shared_memory(8 * 4096, "weft-kv-pool")
shared.mapping[:] = b"".join(bytes([i + 1]) * 4096 for i in range(8))
address = ctypes.addressof(ctypes.c_ubyte.from_buffer(shared.mapping))
endpoint = LocalTransport(HostBlocks(address, 4096, 8, shared.fd)).endpoint()
print(json.dumps([endpoint.transport, endpoint.segment, endpoint.pool_address, endpoint.file]), flush=True)
signal.pause()
"""


@contextmanager
def lending() -> Iterator[tuple[subprocess.Popen[str], Endpoint]]:
    with subprocess.Popen([sys.executable, "-c", LENDER], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, Endpoint(*json.loads(process.stdout.readline()))
        finally:
            process.kill()


@pytest.fixture(scope="module")
def lender() -> Iterator[Endpoint]:
    with lending() as (_, endpoint):
        yield endpoint


class Ours:
    """A pool full of zeros."""

    def __init__(self) -> None:
        shared = create_shared_memory(BLOCK_BYTES * NUM_BLOCKS, "weft-kv-pool")
        assert isinstance(shared, SharedMemory)
        self.shared = shared
        self.address = ctypes.addressof(ctypes.c_ubyte.from_buffer(shared.mapping))
        self.transport = LocalTransport(HostBlocks(self.address, BLOCK_BYTES, NUM_BLOCKS, shared.fd))

    def run(self, peer: Endpoint, remote: int, local: int, count: int = 1) -> CopyRange:
        return CopyRange(
            peer.pool_address + remote * BLOCK_BYTES, self.address + local * BLOCK_BYTES, count * BLOCK_BYTES
        )

    async def pull(self, peer: Endpoint, *runs: CopyRange, patience: float = 5.0) -> None:
        await self.transport.pull(KvSource(peer, "", RequestKey("r")), runs, patience)

    @property
    def blocks(self) -> list[int]:
        """Return the value that each block is full of."""
        content = [self.shared.mapping[i * BLOCK_BYTES : (i + 1) * BLOCK_BYTES] for i in range(NUM_BLOCKS)]
        assert all(len(set(block)) == 1 for block in content)
        return [block[0] for block in content]


@pytest.fixture(params=[0, BLOCK_BYTES * NUM_BLOCKS], ids=["by a thread", "at once"])
async def ours(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Ours:
    monkeypatch.setattr(transfer, "MAX_BYTES_AT_ONCE", request.param)
    return Ours()


async def test_these_blocks_arrive_and_nothing_else_changes(lender: Endpoint, ours: Ours) -> None:
    assert ours.transport.reaches(lender)
    await ours.pull(lender, ours.run(lender, 6, 1), ours.run(lender, 7, 2), ours.run(lender, 0, 5, 2))
    assert ours.blocks == [0, 7, 8, 0, 0, 1, 2, 0]


async def test_a_lender_that_is_frozen_can_be_read_and_one_that_is_gone_cannot(ours: Ours) -> None:
    with lending() as (process, peer):
        process.send_signal(SIGSTOP)
        await ours.pull(peer, ours.run(peer, 4, 0))
        assert ours.blocks[0] == 5
        process.kill()
        process.wait()
        assert not ours.transport.reaches(peer)
        with pytest.raises(TransferFailed):
            await ours.pull(peer, ours.run(peer, 3, 1))
    assert ours.blocks == [5, 0, 0, 0, 0, 0, 0, 0]


async def test_another_file_under_the_same_number_is_not_read(lender: Endpoint, ours: Ours) -> None:
    place, _, name = lender.file.partition(" ")
    other = name.replace(name[-45:-13], "0" * 32)
    assert other != name
    for file in (f"{place} {other}", f"{os.getpid()}/fd/0 {name}", f"../{lender.file}", f"{place} /etc/passwd", ""):
        peer = replace(lender, file=file)
        assert not ours.transport.reaches(peer), file
        with pytest.raises(TransferFailed):
            await ours.pull(peer, ours.run(peer, 0, 0))
    assert not any(ours.blocks)


async def test_what_lies_outside_of_either_pool_is_refused(lender: Endpoint, ours: Ours) -> None:
    for run in (ours.run(lender, NUM_BLOCKS, 0), ours.run(lender, -1, 0), ours.run(lender, 0, NUM_BLOCKS)):
        with pytest.raises(TransferFailed):
            await ours.pull(lender, run)
    with pytest.raises(TransferFailed):
        await ours.pull(lender, ours.run(lender, 0, -1))
    assert not any(ours.blocks)


async def test_nothing_is_read_after_the_deadline(lender: Endpoint, ours: Ours) -> None:
    with pytest.raises(TransferFailed, match="deadline passed"):
        await ours.pull(lender, ours.run(lender, 0, 0), patience=-1.0)
    assert not any(ours.blocks)


async def test_a_pull_leaves_no_file_open(lender: Endpoint, ours: Ours) -> None:
    await asyncio.gather(*(ours.pull(lender, ours.run(lender, i, i)) for i in range(NUM_BLOCKS)))
    assert ours.blocks == list(range(1, NUM_BLOCKS + 1))
    assert not open_files(lender)


def open_files(peer: Endpoint) -> list[str]:
    """The numbers under which this process has the pool of `peer` open.

    No other file counts: an earlier test's pools close whenever the collector comes to them.
    """
    _, _, target = peer.file.partition(" ")
    return [name for name in os.listdir("/proc/self/fd") if os.path.realpath(f"/proc/self/fd/{name}") == target]


@pytest.fixture(params=["host", "torch"])
def memory(request: pytest.FixtureRequest) -> BlockBytes:
    if request.param == "torch":
        return TensorBlocks(torch.arange(32, dtype=torch.uint8).view(4, 8))
    backing = (ctypes.c_ubyte * 32)(*range(32))
    blocks = HostBlocks(ctypes.addressof(backing), 8, 4)
    blocks.backing = backing  # type: ignore[attr-defined] # kept alive
    return blocks


def test_a_block_is_read_where_it_lies(memory: BlockBytes) -> None:
    assert list(memory.read(2)) == list(range(16, 24))
    memory.write(2, 3, b"\xff\xfe")
    assert list(memory.read(2)) == [16, 17, 18, 255, 254, 21, 22, 23]
    assert list(memory.read(1)) + list(memory.read(3)) == [*range(8, 16), *range(24, 32)]


@pytest.mark.parametrize(("block", "offset", "size"), [(0, 5, 4), (3, -1, 2), (4, 0, 1), (-1, 0, 1), (0, 9, 0)])
def test_nothing_is_written_outside_a_block(memory: BlockBytes, block: int, offset: int, size: int) -> None:
    with pytest.raises(ValueError, match="block"):
        memory.write(block, offset, bytes(size))
    assert [byte for number in range(4) for byte in memory.read(number)] == list(range(32))


def test_many_blocks_are_copied_out_and_in_one_behind_the_other(memory: BlockBytes) -> None:
    area = memoryview(bytearray(16))
    memory.copy_out([3, 1], area)
    assert list(area) == [*range(24, 32), *range(8, 16)]
    memory.copy_in(area, [0, 3])
    assert [byte for number in range(4) for byte in memory.read(number)] == [
        *range(24, 32),
        *range(8, 16),
        *range(16, 24),
        *range(8, 16),
    ]
    memory.copy_out([], area[:0])
    memory.copy_in(area[:0], [])


def test_checksums_are_xxh3_of_each_block(memory: BlockBytes) -> None:
    assert checksums(memory, [1, 0], [0, 0]) == [
        xxhash.xxh3_64_intdigest(bytes(range(8, 16))),
        xxhash.xxh3_64_intdigest(bytes(range(8))),
    ]


def test_checksums_add_up_over_units_and_notice_a_swap() -> None:
    page = memoryview(bytes(range(32)))
    units = (Unit(0, 8, 40), Unit(8, 16, 41), Unit(24, 8, 42))
    parts = [checksum(page, units[:1]), checksum(page, units[1:])]
    assert checksum(page, units) == sum(parts) % 2**64
    swapped = memoryview(bytes([*range(24, 32), *range(8, 24), *range(8)]))
    assert checksum(swapped, units) != checksum(page, units)


def test_pages_of_each_group_have_their_own_units() -> None:
    backing = (ctypes.c_ubyte * 16)(*range(16))
    units = ((Unit(0, 8, 0),), (Unit(0, 4, 1), Unit(4, 2, 2)))
    pool = HostBlocks(ctypes.addressof(backing), 8, 2, units=units)
    first, second = checksums(pool, [0, 1], [0, 1])
    assert first == xxhash.xxh3_64_intdigest(bytes(range(8)))
    hashes = xxhash.xxh3_64_intdigest(bytes(range(8, 12)), 1), xxhash.xxh3_64_intdigest(bytes(range(12, 14)), 2)
    assert second == sum(hashes) % 2**64
