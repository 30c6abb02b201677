"""The pool's bytes as transports and checks see them, wherever the pool lies."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.engine.messages import PoolMemory
from weft.kv.memory import BlockBytes, HostBlocks


def open_blocks(pool: PoolMemory, device: str) -> BlockBytes:
    """The pool of this process, on "cpu" or "cuda"."""
    if device == "cpu":
        return HostBlocks(pool.address, pool.block_bytes, pool.num_blocks, pool.shared_fd)
    return TensorBlocks(torch.as_tensor(_DeviceMemory(pool), device=device))


class TensorBlocks:
    """A pool that only torch can reach. Copies go beside the engine's work, on a stream of their own, and wait for none
    of its steps: what is copied out must be final, and nobody may look at what is copied in before that is done.
    """

    is_near = False
    shared_fd = None

    def __init__(self, pool: Tensor) -> None:
        """`pool`: uint8 [num_blocks, block_bytes], contiguous."""
        assert pool.is_contiguous()
        assert pool.dtype == torch.uint8
        self._pool = pool
        self.address = pool.data_ptr()
        self.num_blocks, self.block_bytes = pool.shape
        self._aside = torch.cuda.Stream(pool.device) if pool.is_cuda else None  # type: ignore[no-untyped-call]

    def copy_out(self, blocks: Sequence[int], area: memoryview) -> None:
        """See BlockBytes."""
        self._copy([(row, self._pool[block]) for row, block in zip(self._rows(area), blocks, strict=True)])

    def copy_in(self, area: memoryview, blocks: Sequence[int]) -> None:
        """See BlockBytes."""
        self._copy([(self._pool[block], row) for row, block in zip(self._rows(area), blocks, strict=True)])

    def _rows(self, area: memoryview) -> Sequence[Tensor]:
        # block by block: to gather them first would take memory of a device that the pool has filled
        return torch.frombuffer(area, dtype=torch.uint8).view(-1, self.block_bytes).unbind() if area else ()

    def _copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        with torch.cuda.stream(self._aside):  # none on a CPU
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        if self._aside is not None:
            self._aside.synchronize()

    def read(self, block: int) -> memoryview:
        """A copy."""
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"no block {block} in a pool of {self.num_blocks}")
        copied = torch.empty(self.block_bytes, dtype=torch.uint8)
        self._copy([(copied, self._pool[block])])
        return memoryview(copied.numpy())  # type: ignore[arg-type]

    def write(self, block: int, offset_bytes: int, data: bytes) -> None:
        """See BlockBytes."""
        if not 0 <= block < self.num_blocks or not 0 <= offset_bytes <= self.block_bytes - len(data):
            raise ValueError(f"{len(data)} bytes at {offset_bytes} do not fit into block {block}")
        if data:
            source = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            self._copy([(self._pool[block, offset_bytes : offset_bytes + len(data)], source)])


class _DeviceMemory:
    """An address on the device, in the form that torch takes without copying."""

    def __init__(self, pool: PoolMemory) -> None:
        self.__cuda_array_interface__ = {
            "shape": (pool.num_blocks, pool.block_bytes),
            "typestr": "|u1",
            "data": (pool.address, False),
            "version": 3,
        }
