"""Onto a device without waiting for it, so that a step can be launched while another one runs."""

from __future__ import annotations

import torch
from torch import Tensor


def pinned_upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host's; the copy takes its turn in the device's work.

    It goes through pinned memory, which torch gives to nobody else before the copy is done: from other memory, the host
    would wait until the device has come to it.
    """
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
