"""The weights of a layer's experts, as the machine that they run on takes them. Knows no routing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from weft_kernels.linear import PackedWeight, pack


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """gate_up[e]: [2 size, hidden], gate above up; down[e]: [hidden, size].

    `stacked`: on a GPU, the same as [experts, 2 size, hidden] and [experts, hidden, size]; the others are views of it.
    """

    gate_up: tuple[PackedWeight, ...]
    down: tuple[PackedWeight, ...]
    stacked: tuple[Tensor, Tensor] | None = None


def pack_experts(pairs: Iterable[tuple[Tensor, Tensor]], dtype: torch.dtype) -> PackedExperts:
    """Prepare each expert's gate_up and down for activations of `dtype`; on a CPU one after the other, see `pack`."""
    gate_ups: list[PackedWeight] = []
    downs: list[PackedWeight] = []
    on_device: list[tuple[Tensor, Tensor]] = []
    for gate_up, down in pairs:
        if gate_up.is_cuda:
            on_device.append((gate_up, down))
            continue
        gate_ups.append(pack(gate_up, dtype))
        downs.append(pack(down, dtype))
    if not on_device:
        return PackedExperts(tuple(gate_ups), tuple(downs))
    stacks = [torch.stack(each).to(dtype) for each in zip(*on_device, strict=True)]
    gate_up_packed, down_packed = (tuple(pack(expert, dtype) for expert in stack) for stack in stacks)
    return PackedExperts(gate_up_packed, down_packed, (stacks[0], stacks[1]))
