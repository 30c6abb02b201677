"""The weights of a layer's experts, as the machine that they run on takes them. Knows no routing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from weft_kernels.linear import PackedWeight, pack
from weft_kernels.packed import Matrix, Stored, held, stack


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """gate_up[e]: [2 size, hidden], gate above up; down[e]: [hidden, size]; on a CPU.

    `stacked`: on a GPU, instead: all of a kind as one matrix, the experts' rows one below the other.
    """

    gate_up: tuple[PackedWeight, ...]
    down: tuple[PackedWeight, ...]
    stacked: tuple[Matrix, Matrix] | None = None


def pack_experts(
    pairs: Iterable[tuple[Stored, Stored]], dtype: torch.dtype, is_resident: bool = False
) -> PackedExperts:
    """Prepare each expert's gate_up and down for activations of `dtype`; on a CPU one after the other, see `pack`.

    All of a kind are stored alike. `is_resident`: see `weft_kernels.packed.held`.
    """
    gate_ups: list[PackedWeight] = []
    downs: list[PackedWeight] = []
    on_device: list[tuple[Stored, Stored]] = []
    for pair in pairs:
        if pair[0].device.type == "cuda":
            on_device.append(pair)
            continue
        gate_up, down = (pack(held(each, dtype, is_resident), dtype, is_resident) for each in pair)
        gate_ups.append(gate_up)
        downs.append(down)
    if not on_device:
        return PackedExperts(tuple(gate_ups), tuple(downs))
    stacks = [
        held(_in_dtype(stack(each, dtype=dtype), dtype), dtype, is_resident) for each in zip(*on_device, strict=True)
    ]
    return PackedExperts((), (), (stacks[0], stacks[1]))


def _in_dtype(weight: Stored, dtype: torch.dtype) -> Stored:
    return weight.to(dtype) if isinstance(weight, Tensor) else weight
