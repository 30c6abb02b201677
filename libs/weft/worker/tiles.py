"""Tries tiles for a model's packed matrices on this worker's GPU, within the time that the settings give."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from statistics import median

import torch
from torch import Tensor

from weft.model.decoder import Decoder

logger = logging.getLogger(__name__)
NUM_RUNS = 5


def tune_tiles(decoder: Decoder, rows: Iterable[int], max_seconds: float) -> None:
    """Beside what has been tried before; a cache that cannot be written is no reason to fail."""
    from weft_kernels.packed.tune_all import tune_all  # needs Triton

    try:
        num_tuned = tune_all(decoder.packed, rows, _seconds, max_seconds)
    except OSError as error:
        logger.warning("tiles are not kept for the next start: %s", error)
    else:
        logger.info("tiles: %d products tuned", num_tuned)


def _seconds(call: Callable[[], Tensor]) -> float:
    """What it takes of the GPU, once it is compiled."""
    call()
    times = []
    for _ in range(NUM_RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) / 1000)
    return median(times)
