"""Sampling without a sort, beside the reference that sorts. `python -m loadtest.kernels.sampling`"""

from __future__ import annotations

import sys

import torch

from loadtest.kernels.roofline import Work, report
from weft_kernels.sampling import SamplingRows, sample
from weft_kernels.sampling.reference import sample_reference

VOCABULARY = 128_256
# temperature, top-k, top-p
WAYS = {"plain": (1.0, 0, 1.0), "top-k": (1.0, 50, 1.0), "top-p": (1.0, 0, 0.9), "top-k, top-p": (1.0, 50, 0.9)}


def works() -> list[Work]:
    """Each way at three batch sizes."""
    return [make_work(name, batch) for name in WAYS for batch in (1, 32, 256)]


def make_work(name: str, batch: int) -> Work:
    """The least is one read of the logits; the kernels read them again from the cache."""
    logits = torch.randn(batch, VOCABULARY, device="cuda") * 4
    rows = make_rows(name, batch)
    return Work(
        f"sample {name}, batch {batch}",
        lambda: sample(logits, rows),
        logits.nbytes,
        0,
        lambda: sample_reference(logits, rows),
    )


def make_rows(name: str, batch: int) -> SamplingRows:
    """The same way for all rows."""
    temperature, top_k, top_p = WAYS[name]

    def column(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((batch,), value, dtype=dtype, device="cuda")

    return SamplingRows(
        temperature=column(temperature, torch.float32),
        top_k=column(top_k, torch.int64),
        top_p=column(top_p, torch.float64),
        min_p=column(0, torch.float32),
        seeds=torch.arange(batch, device="cuda"),
        positions=column(100, torch.int64),
        has_top_k=top_k > 0,
        has_top_p=top_p < 1,
    )


if __name__ == "__main__":
    sys.exit(report("sampling", works))
