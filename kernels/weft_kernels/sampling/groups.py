"""Sampling on a CPU: a few rows at a time, so that what is made of them stays in the processor's cache.

Greedy rows are looked through for their best token, and pay for nobody else's filters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft_kernels.sampling.reference import draw
from weft_kernels.sampling.rows import SamplingRows

GROUP_ITEMS = 1 << 18


def sample_groups(logits: Tensor, rows: SamplingRows) -> Tensor:
    """See `weft_kernels.sampling.sample`."""
    drawn, size = (rows.temperature > 0).nonzero()[:, 0], max(1, GROUP_ITEMS // logits.shape[1])
    if len(drawn) == len(logits) <= size:
        return draw(logits, rows)
    tokens = best(logits)
    for some in torch.split(drawn, size):
        tokens[some] = draw(logits[some], rows.of(some))
    return tokens


def best(logits: Tensor) -> Tensor:
    """[R] int64: the argmax, the first of equals. By numpy: of 151,936 logits torch took 0.27 ms, numpy 0.01."""
    return torch.from_numpy(logits.numpy().argmax(-1))
