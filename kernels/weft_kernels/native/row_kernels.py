"""Kernels of rows, by the kind of their numbers. Knows tensors, which the library itself does not."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from weft_kernels.native import native

SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}


def row_kernel(name: str, x: Tensor, size: int) -> Callable[..., None] | None:
    """The function of that name for `x`, where it lies on a CPU and runs of `size` of its items are whole vectors."""
    if x.is_cuda or x.dtype not in SUFFIXES:
        return None
    function, width = _function_of_rows(native(), name, x.dtype)
    return None if size % width else function


@cache
def _function_of_rows(
    library: ctypes.CDLL | None, name: str, dtype: torch.dtype
) -> tuple[Callable[..., None] | None, int]:
    """It, and how many items make a vector. Kept: a step of one sequence asks a hundred times."""
    if library is None:
        return None, 1
    return getattr(library, f"weft_{name}_{SUFFIXES[dtype]}"), library.weft_width()
