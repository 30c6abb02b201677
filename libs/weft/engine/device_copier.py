"""Copies between the host and one device, in order with the device's other work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft_kernels.launch import pinned_upload

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """A point in the device's queue of work. On a CPU all work before it is already done."""

    event: torch.cuda.Event | None

    def wait(self) -> None:
        """Sleep until the device has reached this point."""
        if self.event is not None:
            self.event.synchronize()


@dataclass(frozen=True, slots=True)
class DeviceCopier:
    """Copies to and from one device, in order with its other work."""

    device: torch.device

    @property
    def is_direct(self) -> bool:
        """True if the device computes in host memory."""
        return self.device.type == "cpu"

    def upload(self, array: Array) -> Tensor:
        """Copy an array to the device. The caller may change the array afterwards."""
        return pinned_upload(torch.from_numpy(np.ascontiguousarray(array)), self.device)

    def download(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to the host. Its values are valid after a later event."""
        if self.is_direct:
            return tensor
        return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)

    def record_event(self) -> DeviceEvent:
        """Return an event behind all work launched so far."""
        if self.is_direct:
            return DeviceEvent(None)
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return DeviceEvent(event)
