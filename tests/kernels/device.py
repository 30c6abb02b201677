"""Where kernel tests put their tensors, and in what precision they compare."""

from __future__ import annotations

import pytest
import torch

from weft_kernels.native.build import FLAGS
from weft_kernels.native.processor import most_isa

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# bfloat16 arithmetic is wrong in Triton's interpreter (triton#11584).
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]

# instruction sets of this machine that the C++ kernels have a build for
ISAS = list(FLAGS)[: list(FLAGS).index(most_isa()) + 1] if most_isa() in FLAGS else []

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def close(actual: torch.Tensor, expected: torch.Tensor, factor: float = 1.0) -> None:
    """Equal to within the rounding of the dtype."""
    tolerance = TOLERANCE[actual.dtype] * factor
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
