"""Programmatic dependent launch (Hopper and later): a kernel starts before the previous one has ended.

Such a kernel first allows its successor to launch, then waits before it reads its inputs. After the wait all earlier
launches have ended and their results are visible. This hides the start and end cost of each kernel of a step.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def pdl_launch_args(x: Tensor) -> dict[str, bool]:
    """Return the launch arguments for programmatic dependent launch if the GPU of x supports it.

    Before `gdc_wait` the kernel may read only data that is older than the previous launch, and must not write.
    """
    return {"USES_PDL": True, "launch_pdl": True} if x.is_cuda and _supports_pdl(x.device) else {"USES_PDL": False}


@cache
def _supports_pdl(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)
