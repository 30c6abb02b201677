"""Blocks by number, in plain memory and behind torch."""

from __future__ import annotations

import ctypes

import pytest
import torch
import xxhash

from weft.kv.memory import BlockBytes, HostBlocks, checksums
from weft.worker.pool_memory import TensorBlocks


@pytest.fixture(params=["host", "torch"])
def memory(request: pytest.FixtureRequest) -> BlockBytes:
    """Four blocks of 8 bytes: 0..7, 8..15, ..."""
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
    assert checksums(memory, [1, 0]) == [
        xxhash.xxh3_64_intdigest(bytes(range(8, 16))),
        xxhash.xxh3_64_intdigest(bytes(range(8))),
    ]
