"""Tries tiles for all the packed matrices of a model, as long as that may take. Knows no model and no clock of a GPU.

What was tried is kept, so that the next start goes on where this one stopped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from weft_kernels.packed import F12, Fp8, Int4
from weft_kernels.packed.linear import is_tuned, tiles_table, tune
from weft_kernels.packed.tuning import Timer, row_classes

logger = logging.getLogger(__name__)
# layers that are read one after the other: of a large model, no cache holds what is read next
MAX_ALIKE = 8


class _TimeIsOver(Exception):
    """In the midst of a shape, which is left as it was."""


def tune_all(weights: Iterable[F12 | Fp8 | Int4], rows: Iterable[int], seconds: Timer, max_seconds: float) -> int:
    """Each distinct shape among `weights`, of one device, with as many rows as `rows` has, the fewest first: those are
    the steps there are most of. `seconds` times calls. Returns how many were tuned now; raises OSError."""
    deadline = time.monotonic() + max_seconds
    shapes: dict[tuple[type, int, int], list[F12 | Fp8 | Int4]] = {}
    for weight in weights:
        shapes.setdefault((type(weight), *weight.shape), []).append(weight)
    if not shapes:
        return 0

    def timed(calls: Sequence[Callable[[], Tensor]]) -> float:
        if time.monotonic() >= deadline:
            raise _TimeIsOver
        return seconds(calls)

    table, num_tuned = tiles_table(next(iter(shapes.values()))[0].device), 0
    with table.exclusive(max_seconds) as is_alone:
        try:
            for num_rows in row_classes(rows) if is_alone else ():
                for alike in shapes.values():
                    num_tuned += _tune_one(alike, num_rows, timed)
        except _TimeIsOver:
            logger.info("tiles: the time for trying is over; the next start goes on")
        finally:
            if num_tuned:
                table.save()
    return num_tuned


def _tune_one(alike: list[F12 | Fp8 | Int4], num_rows: int, timed: Timer) -> bool:
    x = torch.randn(num_rows, alike[0].shape[1], device=alike[0].device).to(torch.bfloat16)
    return not is_tuned(x, alike[0]) and tune(x, alike[:MAX_ALIKE], timed) is not None
