"""The contract of the attention kernels: which keys are seen, which layouts are taken, how tiles are cut."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from weft_kernels.paged_attention.tensors import PagedTensors

LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class Shape:
    """scale: of the scores. window: a query sees so many last keys; chunk: it sees its aligned chunk; 0: all before it.

    num_splits: a power of two, programs that share one sequence's keys in decoding; 0 chooses by the batch.
    """

    scale: float
    window: int = 0
    chunk: int = 0
    num_splits: int = 0

    def tiles(self, keys: Tensor, values: Tensor, block_n: int) -> dict[str, int | bool]:
        """The compile-time sizes that follow from the layout.

        A dimension that is no power of two is cut into a large power of two and a tail: 576 is 512 + 64, 96 is 64 + 32.
        """
        dim, value_dim = keys.shape[3], values.shape[3]
        block_d = max(16, 1 << (dim.bit_length() - 1))
        tail = max(0, dim - block_d)
        return {
            "BLOCK_TOKENS": keys.shape[2],
            "DIM": dim,
            "VALUE_DIM": value_dim,
            "BLOCK_N": block_n,
            "BLOCK_D": block_d,
            "BLOCK_TAIL": _power_of_two(tail) if tail else 0,
            "BLOCK_V": _power_of_two(value_dim),
            # MLA: the value is the first part of the key, and is not read again.
            "VALUE_IS_KEY": keys.data_ptr() == values.data_ptr() and value_dim == block_d,
        }


def check(q: Tensor, keys: Tensor, values: Tensor, batch: PagedTensors, out: Tensor) -> None:
    """q: [T, heads, dim]; keys: [blocks, kv_heads, block_tokens, dim] and values [..., value_dim], of one pool."""
    assert q.is_contiguous()
    assert out.is_contiguous()
    assert q.shape[2] == keys.shape[3]
    assert out.shape == (*q.shape[:2], values.shape[3])
    assert keys.shape[:3] == values.shape[:3]
    assert keys.stride() == values.stride()
    assert keys.stride(3) == 1
    assert q.shape[1] % keys.shape[1] == 0
    assert q.dtype == keys.dtype == values.dtype == out.dtype
    assert q.device == keys.device == out.device == batch.context_lens.device


def _power_of_two(value: int) -> int:
    return max(16, 1 << (value - 1).bit_length())
