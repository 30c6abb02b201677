"""Weights as they stay in memory: plain, or packed and unpacked on their way into a product.

A `Matrix` is one of these forms. Linear layers and experts multiply all of them; what each looks like stays in here.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from weft_kernels.packed.f12 import F12 as F12
from weft_kernels.packed.f12 import pack_f12 as pack_f12

Matrix = Tensor | F12


def resident(weight: Tensor) -> Matrix:
    """A matrix [outputs, inputs] as F12, if it is bfloat16 and that suits it; otherwise as it came.

    On a CPU it is unpacked again at once: nothing there reads F12, and what is computed with has been through it.
    """
    if weight.dtype != torch.bfloat16:
        return weight
    packed = pack_f12(weight)
    if not packed.suits:
        return weight
    return packed if weight.is_cuda else packed.unpack()


def rows_of(table: Matrix, ids: Tensor) -> Tensor:
    """[T, columns]: the rows of a table of embeddings that ids [T] int64 name, every bit as it was."""
    if isinstance(table, Tensor):
        return functional.embedding(ids, table)
    from weft_kernels.packed.unpack import unpack_rows

    return unpack_rows(table, ids)
