"""The gate of a SwiGLU layer. `python -m loadtest.kernels.silu_mul`"""

from __future__ import annotations

import sys

import torch

from loadtest.kernels.roofline import Work, report
from weft_kernels.silu_mul import silu_mul, silu_mul_reference


def works() -> list[Work]:
    """An 8B model's width."""
    return [make_work(rows, 14336) for rows in (1, 64, 2048, 8192)]


def make_work(rows: int, size: int) -> Work:
    """Gate and up read, their product written."""
    x = torch.randn(rows, 2 * size, device="cuda", dtype=torch.bfloat16)
    num_bytes = 1.5 * x.nbytes
    return Work(f"silu_mul [{rows}, {size}]", lambda: silu_mul(x), num_bytes, 0, lambda: silu_mul_reference(x))


if __name__ == "__main__":
    sys.exit(report("SiLU-mul", works))
