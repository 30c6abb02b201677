"""Launches that begin before the one ahead of them has ended: programmatic dependent launch, of Hopper and later.

A kernel that is launched so says first that the next one may come, and waits for what it reads: then all that was
launched before has ended, and its results are there. Otherwise each of a step's kernels costs a start and an end.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def pdl_launch_args(x: Tensor) -> dict[str, bool]:
    """Arguments of such a launch, where x's GPU can do that. What its kernel reads before `gdc_wait` has to have been
    there long ago; until then it writes nothing."""
    return {"USES_PDL": True, "launch_pdl": True} if x.is_cuda and _supports_pdl(x.device) else {"USES_PDL": False}


@cache
def _supports_pdl(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)
