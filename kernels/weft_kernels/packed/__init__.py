"""Weight matrices as they stay in memory: plain, or packed and unpacked on their way into a product.

Linear layers and experts multiply every form of `Matrix`; this package hides the forms.
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
"""Forms of a matrix in a checkpoint."""
Matrix = Stored | F12


def stack(parts: Sequence[Stored], order: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Stored:
    """Stack matrices, optionally with their rows in another `order`; packed if all parts are packed alike.

    Otherwise packed parts are unpacked to `dtype`, and the result has the widest dtype of all.
    """
    if all(isinstance(each, Fp8) for each in parts):
        return stack_fp8([each for each in parts if isinstance(each, Fp8)], order)
    if all(isinstance(each, Int4) for each in parts):
        return stack_int4([each for each in parts if isinstance(each, Int4)], order)
    whole = [plain(each, dtype) for each in parts]
    matrix = whole[0] if len(whole) == 1 else torch.cat(whole)
    return matrix if order is None else matrix[order.to(matrix.device)]


def plain(weight: Stored, dtype: torch.dtype) -> Tensor:
    """Return the matrix that packed weights represent, in `dtype`; a plain one unchanged."""
    return weight if isinstance(weight, Tensor) else weight.unpack().to(dtype)


def on_device(weight: Stored, dtype: torch.dtype, is_resident: bool = False) -> Matrix:
    """Return the form in which a matrix stays on its device, for activations of `dtype`; with `is_resident`, F12 if
    possible.

    On a CPU all are plain until linear layers pack them, see `weft_kernels.linear`.
    """
    if isinstance(weight, Tensor):
        return as_f12(weight) if is_resident else weight
    return weight if weight.device.type == "cuda" else plain(weight, dtype)


def as_f12(weight: Tensor) -> Tensor | F12:
    """Return a GPU matrix [outputs, inputs] as F12, if it is bfloat16 and F12 suits it; otherwise unchanged."""
    if weight.dtype != torch.bfloat16 or not weight.is_cuda:
        return weight
    packed = pack_f12(weight)
    return packed if packed.suits else weight


def embedding_rows(table: Tensor | F12, ids: Tensor) -> Tensor:
    """Return [T, columns]: the rows of an embedding table that ids [T] int64 name, bit for bit."""
    if isinstance(table, Tensor):
        return functional.embedding(ids, table)
    from weft_kernels.packed.f12_unpack import unpack_rows

    return unpack_rows(table, ids)
