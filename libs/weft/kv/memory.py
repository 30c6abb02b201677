"""Access to the pool's bytes by block number, and block checksums."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import xxhash


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

    def __init__(self, address: int, block_bytes: int, num_blocks: int, shared_fd: int | None = None) -> None:
        self.address = address
        self.shared_fd = shared_fd
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


def checksums(memory: BlockBytes, blocks: Sequence[int]) -> list[int]:
    """Return xxh3_64 of each block at about 10 GB/s; use a thread above 1 MB."""
    return [xxhash.xxh3_64_intdigest(memory.read(block)) for block in blocks]
