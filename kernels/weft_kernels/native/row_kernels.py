"""Looks up native kernels that work on rows, by dtype."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from weft_kernels.native import native

SUFFIXES = {torch.float32: "f32", torch.bfloat16: "bf16"}


def row_kernel(name: str, x: Tensor, size: int) -> Callable[..., None] | None:
    """Return the native function for `x`, if x is on a CPU and `size` items are a whole number of vectors."""
    if x.is_cuda or x.dtype not in SUFFIXES:
        return None
    function, width = _function_of_rows(native(), name, x.dtype)
    return None if size % width else function


@cache
def _function_of_rows(
    library: ctypes.CDLL | None, name: str, dtype: torch.dtype
) -> tuple[Callable[..., None] | None, int]:
    """Return the function and the number of items in a vector.

    Cached, because a step of one sequence asks a hundred times.
    """
    if library is None:
        return None, 1
    return getattr(library, f"weft_{name}_{SUFFIXES[dtype]}"), library.weft_width()
