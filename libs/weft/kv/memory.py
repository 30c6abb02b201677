"""The bytes of a block pool by block number, and their checksums. Knows addresses, not what the bytes mean."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import xxhash


class BlockBytes(Protocol):
    """Read and written by transports and checks, never by the engine."""

    @property
    def address(self) -> int:
        """Of block 0."""

    @property
    def block_bytes(self) -> int:
        """Size of one block."""

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""

    @property
    def shared_fd(self) -> int | None:
        """An open file that begins with the pool's bytes, for other processes to map; None where there is none."""

    @property
    def is_host(self) -> bool:
        """Copies take as long as their bytes do; otherwise they wait for a device, and want a thread."""

    def copy_out(self, blocks: Sequence[int], area: memoryview) -> None:
        """These blocks into an area of their size, one behind the other; whole when it returns."""

    def copy_in(self, area: memoryview, blocks: Sequence[int]) -> None:
        """The way back."""

    def read(self, block: int) -> memoryview:
        """The bytes of one block, as they are now."""

    def write(self, block: int, offset_bytes: int, data: bytes) -> None:
        """Overwrite a part of one block. Raises ValueError when it would leave the block."""


class HostBlocks:
    """A pool in this process' own memory; `read` copies nothing."""

    is_host = True

    def __init__(self, address: int, block_bytes: int, num_blocks: int, shared_fd: int | None = None) -> None:
        self.address = address
        self.shared_fd = shared_fd
        self.block_bytes = block_bytes
        self.num_blocks = num_blocks
        whole = (ctypes.c_ubyte * (block_bytes * num_blocks)).from_address(address)
        self._bytes = memoryview(whole).cast("B")

    def read(self, block: int) -> memoryview:
        """A view, not a copy."""
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"no block {block} in a pool of {self.num_blocks}")
        return self._bytes[block * self.block_bytes : (block + 1) * self.block_bytes]

    def copy_out(self, blocks: Sequence[int], area: memoryview) -> None:
        """See BlockBytes."""
        for slot, block in enumerate(blocks):
            area[slot * self.block_bytes : (slot + 1) * self.block_bytes] = self.read(block)

    def copy_in(self, area: memoryview, blocks: Sequence[int]) -> None:
        """See BlockBytes."""
        for slot, block in enumerate(blocks):
            self.read(block)[:] = area[slot * self.block_bytes : (slot + 1) * self.block_bytes]

    def write(self, block: int, offset_bytes: int, data: bytes) -> None:
        """In place."""
        if offset_bytes < 0 or offset_bytes + len(data) > self.block_bytes:
            raise ValueError(f"{len(data)} bytes at {offset_bytes} leave a block of {self.block_bytes}")
        self.read(block)[offset_bytes : offset_bytes + len(data)] = data


def checksums(memory: BlockBytes, blocks: Sequence[int]) -> list[int]:
    """xxh3_64 of each block, about 10 GB/s: give it a thread of its own above a megabyte or so."""
    return [xxhash.xxh3_64_intdigest(memory.read(block)) for block in blocks]
