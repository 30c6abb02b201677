"""The weights of a layer's experts, as the machine that they run on takes them. Knows no routing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from weft_kernels.linear import PackedWeight, pack
from weft_kernels.packed import Matrix, resident


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """gate_up[e]: [2 size, hidden], gate above up; down[e]: [hidden, size]; on a CPU.

    `stacked`: on a GPU, instead: [experts, 2 size, hidden] and [experts, hidden, size], or, packed, matrices with the
    experts' rows one below the other.
    """

    gate_up: tuple[PackedWeight, ...]
    down: tuple[PackedWeight, ...]
    stacked: tuple[Matrix, Matrix] | None = None


def pack_experts(
    pairs: Iterable[tuple[Tensor, Tensor]], dtype: torch.dtype, is_resident: bool = False
) -> PackedExperts:
    """Prepare each expert's gate_up and down for activations of `dtype`; on a CPU one after the other, see `pack`.

    With `is_resident`, in the form that stays in memory, see `weft_kernels.packed`.
    """
    gate_ups: list[PackedWeight] = []
    downs: list[PackedWeight] = []
    on_device: list[tuple[Tensor, Tensor]] = []
    for gate_up, down in pairs:
        if gate_up.is_cuda:
            on_device.append((gate_up, down))
            continue
        gate_ups.append(pack(resident(gate_up) if is_resident else gate_up, dtype))
        downs.append(pack(resident(down) if is_resident else down, dtype))
    if not on_device:
        return PackedExperts(tuple(gate_ups), tuple(downs))
    stacks = [_stack(torch.stack(each).to(dtype), is_resident) for each in zip(*on_device, strict=True)]
    return PackedExperts((), (), (stacks[0], stacks[1]))


def _stack(experts: Tensor, is_resident: bool) -> Matrix:
    held = resident(experts.flatten(0, 1)) if is_resident else experts
    return experts if isinstance(held, Tensor) else held
