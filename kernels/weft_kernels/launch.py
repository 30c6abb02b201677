"""Helpers for launching kernels: dependent launch, uploads that do not wait, sizes of grids."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def pdl_launch_args(x: Tensor) -> dict[str, bool]:
    """Return the launch arguments for programmatic dependent launch if the GPU of x supports it (Hopper and later).

    The kernel then starts before the previous one has ended, which hides the start and end cost of each kernel of a
    step. It allows its successor to launch, and waits (`gdc_wait`) before it reads its inputs: after the wait all
    earlier launches have ended and their results are visible. Before `gdc_wait` the kernel may read only data that is
    older than the previous launch, and must not write.
    """
    return {"USES_PDL": True, "launch_pdl": True} if x.is_cuda and _supports_pdl(x.device) else {"USES_PDL": False}


@cache
def _supports_pdl(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


def pinned_upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to `device`, in stream order.

    The copy goes through pinned memory, which torch does not reuse before the copy is done. From pageable memory the
    host would wait until the device reaches the copy.
    """
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def cdiv(number: int, divisor: int) -> int:
    """Return number / divisor, rounded up. Triton's version takes ten times as long on the host."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()
