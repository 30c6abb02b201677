"""Between host and device without waiting: what is copied is kept until the copy is done. Knows no batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft_kernels.pinned_upload import pinned_upload

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class DeviceEvent:
    """A place in the device's work; on a CPU everything before it has happened."""

    event: torch.cuda.Event | None

    def wait(self) -> None:
        """Until the device has come so far; the thread sleeps meanwhile."""
        if self.event is not None:
            self.event.synchronize()


@dataclass(frozen=True, slots=True)
class DeviceCopier:
    """To one device. Copies take their turn in its work."""

    device: torch.device

    @property
    def is_direct(self) -> bool:
        """The device computes in the host's memory."""
        return self.device.type == "cpu"

    def upload(self, array: Array) -> Tensor:
        """Onto the device; the array may change afterwards."""
        return pinned_upload(torch.from_numpy(np.ascontiguousarray(array)), self.device)

    def download(self, tensor: Tensor) -> Tensor:
        """To be read on the host after a later `mark`."""
        if self.is_direct:
            return tensor
        return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)

    def record_event(self) -> DeviceEvent:
        """Behind all that was launched so far."""
        if self.is_direct:
            return DeviceEvent(None)
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return DeviceEvent(event)
