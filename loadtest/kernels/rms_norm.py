"""RMSNorm alone and with the residual's addition. `python -m loadtest.kernels.rms_norm`"""

from __future__ import annotations

import sys

import torch

from loadtest.kernels.roofline import Work, report
from weft_kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_reference


def works() -> list[Work]:
    """Hidden sizes of an 8B and a 70B model; a decode batch and two prompts' worth of rows."""
    return [
        make_work(name, rows, hidden)
        for hidden in (4096, 8192)
        for rows in (1, 64, 2048, 8192)
        for name in ("", "add ")
    ]


def make_work(name: str, rows: int, hidden: int) -> Work:
    """Two reads and one write of a row, and the sum's write with the addition."""
    x, residual = torch.randn(2, rows, hidden, device="cuda", dtype=torch.bfloat16)
    weight = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
    title = f"{name}rms_norm [{rows}, {hidden}]"
    if not name:
        plain = 2 * x.nbytes + weight.nbytes
        return Work(title, lambda: rms_norm(x, weight, 1e-5), plain, 0, lambda: rms_norm_reference(x, weight, 1e-5))
    return Work(
        title,
        lambda: add_rms_norm(x, residual, weight, 1e-5),
        4 * x.nbytes + weight.nbytes,
        0,
        lambda: rms_norm_reference(residual + x, weight, 1e-5),
    )


if __name__ == "__main__":
    sys.exit(report("RMSNorm", works))
