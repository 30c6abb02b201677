"""Panels of bfloat16 weights that stay in 12 bits each in a CPU's memory, and are unpacked on their way into products.

Exact: a weight's lower byte stays what it is, and four bits say which of the matrix' 16 commonest upper bytes (sign and
exponent but for its last bit) it has; the few others are listed beside. How they lie is told in packed12.h.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

NUM_NUMBERED = 16
MAX_SHARE = 0.8
"""Of the plain panels, for it to be worth anything."""
UNIT = 64
UNIT_BYTES = 96
SLICE_INPUTS = 256
SAMPLED_SLICES = 256
"""At least so many, spread over a large matrix, say which upper bytes are common."""
MAX_LIST_BYTES = 1 << 32


class _Pointers(ctypes.Structure):
    """`Packed12` in packed12.h."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("units", "upper", "starts", "places", "values"))


@dataclass(frozen=True, slots=True)
class Packed12:
    """Panels [panels, lines, outputs of a panel] of bfloat16.

    units: [panels, lines * outputs / 64, 96] uint8; upper: [16] uint8; starts: [slices + 1] int32, of `places` (in the
    slice, int16 for 16 bits) and `values` (bfloat16) of weights whose upper byte is not in `upper`.
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
        """Of the weights that they stand for."""
        return torch.bfloat16

    @property
    def nbytes(self) -> int:
        """All that it keeps in memory."""
        return sum(each.nbytes for each in (self.units, self.upper, self.starts, self.places, self.values))

    def data_ptr(self) -> int:
        """Of what the kernels take."""
        return ctypes.addressof(self.pointers)

    def unpack(self) -> Tensor:
        """The panels, every bit as it was: what the kernels make of them, said in torch."""
        lower, halves = self.units[..., :UNIT], self.units[..., UNIT:]
        upper = self.upper[torch.cat((halves & 15, halves >> 4), -1).long()]
        joined = (lower.to(torch.int32) | upper.to(torch.int32) << 8).to(torch.int16)
        # of each 16 bytes the first eight belong to the unit's first 32 weights, the others to its last
        items = joined.view(*joined.shape[:-1], UNIT // 16, 2, 8).transpose(-2, -3).reshape(len(joined), -1)
        size = SLICE_INPUTS * self.shape[2]
        slices = torch.arange(len(self.starts) - 1).repeat_interleave(self.starts.diff())
        panel, slot = slices // -(-items.shape[1] // size), slices % -(-items.shape[1] // size)
        items[panel, slot * size + self.places] = self.values.view(torch.int16)
        return items.view(torch.bfloat16).view(self.shape)


def pack_12(library: ctypes.CDLL, panels: Tensor) -> Packed12 | None:
    """`panels` [panels, lines, outputs of a panel] bfloat16; None where they would not get much smaller, or do not fill
    whole units."""
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
    # a listed weight takes four bytes; no memory is given for what stays unwritten
    most = max(0, min(int(MAX_SHARE * panels.nbytes) - packed.nbytes, MAX_LIST_BYTES)) // 4
    places, values = torch.empty(most, dtype=torch.int16), torch.empty(most, dtype=torch.bfloat16)
    outputs = (each.data_ptr() for each in (upper, packed, starts, places, values))
    count = library.weft_packed12_pack(panels.data_ptr(), num_panels, units, *outputs, most, threads)
    if count < 0:
        return None
    places, values = places[:count].clone(), values[:count].clone()
    tensors = packed, upper, starts, places, values
    return Packed12(panels.shape, *tensors, _Pointers(*(each.data_ptr() for each in tensors)))
