"""Weights as they stay in memory: plain, or packed and unpacked on their way into a product.

A `Matrix` is one of these forms. Linear layers and experts multiply all of them; what each looks like stays in here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from weft_kernels.packed.f12 import F12 as F12
from weft_kernels.packed.f12 import pack_f12 as pack_f12
from weft_kernels.packed.quantized import Fp8 as Fp8
from weft_kernels.packed.quantized import Int4 as Int4
from weft_kernels.packed.quantized import read_fp8 as read_fp8
from weft_kernels.packed.quantized import read_int4 as read_int4
from weft_kernels.packed.quantized import stack_fp8, stack_int4

Stored = Tensor | Fp8 | Int4
"""As checkpoints have them."""
Matrix = Stored | F12


def stack(parts: Sequence[Stored], order: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Stored:
    """One below the other, their rows in another `order`: packed as the parts are, if they all are alike.

    Packed ones beside plain ones are unpacked to `dtype`; the whole has the widest dtype of all.
    """
    if all(isinstance(each, Fp8) for each in parts):
        return stack_fp8([each for each in parts if isinstance(each, Fp8)], order)
    if all(isinstance(each, Int4) for each in parts):
        return stack_int4([each for each in parts if isinstance(each, Int4)], order)
    whole = [plain(each, dtype) for each in parts]
    matrix = whole[0] if len(whole) == 1 else torch.cat(whole)
    return matrix if order is None else matrix[order.to(matrix.device)]


def plain(weight: Stored, dtype: torch.dtype) -> Tensor:
    """The matrix that packed weights stand for, in `dtype`; a plain one as it came."""
    return weight if isinstance(weight, Tensor) else weight.unpack().to(dtype)


def on_device(weight: Stored, dtype: torch.dtype, is_resident: bool = False) -> Matrix:
    """The form in which a matrix stays on its device, for activations of `dtype`; with `is_resident`, F12 if it can.

    On a CPU all are plain until they are packed for linear layers, see `weft_kernels.linear`.
    """
    if isinstance(weight, Tensor):
        return as_f12(weight) if is_resident else weight
    return weight if weight.device.type == "cuda" else plain(weight, dtype)


def as_f12(weight: Tensor) -> Tensor | F12:
    """A matrix [outputs, inputs] on a GPU as F12, if it is bfloat16 and that suits it; otherwise as it came."""
    if weight.dtype != torch.bfloat16 or not weight.is_cuda:
        return weight
    packed = pack_f12(weight)
    return packed if packed.suits else weight


def embedding_rows(table: Tensor | F12, ids: Tensor) -> Tensor:
    """[T, columns]: the rows of a table of embeddings that ids [T] int64 name, every bit as it was."""
    if isinstance(table, Tensor):
        return functional.embedding(ids, table)
    from weft_kernels.packed.f12_unpack import unpack_rows

    return unpack_rows(table, ids)
