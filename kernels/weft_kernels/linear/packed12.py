"""bfloat16 panels in 12 bits per weight in a CPU's memory, unpacked on their way into products.

The packing is exact. It keeps the lower byte of a weight. Four bits select one of the 16 commonest upper bytes of the
matrix (sign and exponent without its last bit). Weights with other upper bytes are listed. packed12.h has the layout.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

NUM_NUMBERED = 16
MAX_SHARE = 0.8
"""Largest size relative to the plain panels for which packing pays."""
UNIT = 64
UNIT_BYTES = 96
SLICE_INPUTS = 256
SAMPLED_SLICES = 256
"""Minimum number of slices, spread over a large matrix, from which the common upper bytes are counted."""
MAX_LIST_BYTES = 1 << 32


class _Pointers(ctypes.Structure):
    """Memory layout of `Packed12` in packed12.h."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("units", "upper", "starts", "places", "values"))


@dataclass(frozen=True, slots=True)
class Packed12:
    """Panels [panels, lines, outputs of a panel] of bfloat16.

    units: [panels, lines * outputs / 64, 96] uint8; upper: [16] uint8, the common upper bytes.
    starts: [slices + 1] int32 into `places` and `values`, the weights with other upper bytes.
    places: positions in the slice, 16 bits stored as int16; values: bfloat16.
    """

    shape: torch.Size
    units: Tensor
    upper: Tensor
    starts: Tensor
    places: Tensor
    values: Tensor
    pointers: _Pointers

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the packed weights."""
        return torch.bfloat16

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self.units, self.upper, self.starts, self.places, self.values))

    def data_ptr(self) -> int:
        """Return the address of the structure that the native kernels take."""
        return ctypes.addressof(self.pointers)

    def unpack(self) -> Tensor:
        """Return the panels, bit for bit; this is the meaning of the packed form in torch."""
        lower, halves = self.units[..., :UNIT], self.units[..., UNIT:]
        upper = self.upper[torch.cat((halves & 15, halves >> 4), -1).long()]
        joined = (lower.to(torch.int32) | upper.to(torch.int32) << 8).to(torch.int16)
        # Of each 16 bytes the first eight belong to the first 32 weights of the unit, the others to the last 32.
        items = joined.view(*joined.shape[:-1], UNIT // 16, 2, 8).transpose(-2, -3).reshape(len(joined), -1)
        size = SLICE_INPUTS * self.shape[2]
        slices = torch.arange(len(self.starts) - 1).repeat_interleave(self.starts.diff())
        panel, slot = slices // -(-items.shape[1] // size), slices % -(-items.shape[1] // size)
        items[panel, slot * size + self.places] = self.values.view(torch.int16)
        return items.view(torch.bfloat16).view(self.shape)


def pack_12(library: ctypes.CDLL, panels: Tensor) -> Packed12 | None:
    """Pack `panels` [panels, lines, outputs of a panel] bfloat16.

    Returns None if packing saves too little, or if a panel is not a whole number of units.
    """
    num_panels, items = len(panels), panels[0].numel()
    units, threads = items // UNIT, torch.get_num_threads()
    if items % UNIT:
        return None
    slices = num_panels * -(-items // (SLICE_INPUTS * panels.shape[2]))
    counts = torch.zeros(256, dtype=torch.int64)
    library.weft_packed12_count(panels.data_ptr(), num_panels, units, 1 + slices // SAMPLED_SLICES, counts.data_ptr())
    upper = counts.argsort(descending=True, stable=True)[:NUM_NUMBERED].to(torch.uint8)
    packed = torch.empty(num_panels, units, UNIT_BYTES, dtype=torch.uint8)
    starts = torch.empty(slices + 1, dtype=torch.int32)
    # A listed weight takes four bytes. The system backs only the written part with memory.
    most = max(0, min(int(MAX_SHARE * panels.nbytes) - packed.nbytes, MAX_LIST_BYTES)) // 4
    places, values = torch.empty(most, dtype=torch.int16), torch.empty(most, dtype=torch.bfloat16)
    outputs = (each.data_ptr() for each in (upper, packed, starts, places, values))
    count = library.weft_packed12_pack(panels.data_ptr(), num_panels, units, *outputs, most, threads)
    if count < 0:
        return None
    places, values = places[:count].clone(), values[:count].clone()
    tensors = packed, upper, starts, places, values
    return Packed12(panels.shape, *tensors, _Pointers(*(each.data_ptr() for each in tensors)))
