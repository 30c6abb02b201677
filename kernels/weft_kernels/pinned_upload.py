"""Copies host tensors to a device without waiting, so that a step can be launched while another one runs."""

from __future__ import annotations

import torch
from torch import Tensor


def pinned_upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to `device`, in stream order.

    The copy goes through pinned memory, which torch does not reuse before the copy is done. From pageable memory the
    host would wait until the device reaches the copy.
    """
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
