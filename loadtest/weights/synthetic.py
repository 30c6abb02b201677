"""Tensors with the statistics that are published for language models: channel scales, heavy tails.

The kinds bracket what was measured on 3,875 real matrices (exponent entropy 2.57 to 2.74 bits; ZipServ, arXiv
2603.17435). Real checkpoints of that size are not to be had here.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint16]
KINDS = ("gauss", "row", "rowcol", "t6", "rowcol_t8", "heavyrc")


def tensor(kind: str, rows: int, columns: int, seed: int = 0) -> Words:
    """[rows, columns] of BF16 patterns: normal or Student-t weights, rows and columns lognormally louder or quieter."""
    rng = np.random.default_rng([seed, KINDS.index(kind)])
    degrees = {"t6": 6, "rowcol_t8": 8}.get(kind)
    values = rng.standard_t(degrees, (rows, columns)) if degrees else rng.standard_normal((rows, columns))
    spread = {"gauss": 0.0, "t6": 0.0, "rowcol_t8": 0.2, "heavyrc": 0.5}.get(kind, 0.25)
    values *= np.exp(spread * rng.standard_normal((rows, 1)))
    if kind != "row":
        values *= np.exp(spread * rng.standard_normal((1, columns)))
    return to_bf16(0.02 * values)


def to_bf16(values: NDArray[np.float64]) -> Words:
    """To the nearest, ties to even."""
    words = values.astype(np.float32).view(np.uint32)
    return ((words + 0x7FFF + ((words >> 16) & 1)) >> 16).astype(np.uint16)
