"""Mixture of experts: each row goes through the gated MLPs that its router chose."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from weft_kernels.activations import sigmoid
from weft_kernels.linear import PackedWeight, linear, pack
from weft_kernels.packed import Matrix, Stored, on_device, stack
from weft_kernels.silu_mul import silu_mul


def moe(x: Tensor, chosen: Tensor, weights: Tensor, experts: PackedExperts, is_on_input: bool) -> Tensor:
    """out[t] = sum over j of weights[t, j] * mlp(chosen[t, j], x[t]), mlp(e, x) = down[e] (silu(gate[e] x) * up[e] x).

    Biases are added to all three products, and another activation replaces silu, if `experts` has them.
    x: [T, hidden], of the packed dtype. chosen: [T, k] int64, no expert twice in a row. weights: [T, k] float32.
    With `is_on_input` the weight multiplies x before the expert instead. Returns [T, hidden] in x's dtype.

    If `experts` are a part of the layer's, the choices of others add nothing.
    """
    if experts.held is not None:
        chosen = _own_numbers(chosen, experts.held)
    if experts.stacked is not None:
        from weft_kernels.moe.kernel import moe_kernel

        gate_up, down = experts.stacked
        is_part = experts.held is not None
        return moe_kernel(x, chosen, weights, gate_up, down, is_on_input, experts.biases, experts.swiglu, is_part)
    return moe_grouped(x, chosen, weights, experts, is_on_input)


def _own_numbers(chosen: Tensor, held: range) -> Tensor:
    """Return numbers among the experts `held`, and for others the number behind the last."""
    is_held = (chosen >= held.start) & (chosen < held.stop)
    return torch.where(is_held, chosen - held.start, len(held))


@dataclass(frozen=True, slots=True)
class ClampedSwiGlu:
    """(up + 1) * gate * sigmoid(alpha * gate), with gate at most `limit` and up between -limit and limit."""

    alpha: float
    limit: float

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return the activation, in the dtype of `gate`."""
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * (gate * sigmoid(gate * self.alpha))


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """Expert weights of one layer in the form that the device needs.

    On a CPU: gate_up[e] is [2 size, hidden], gate above up; down[e] is [hidden, size]. On a GPU: `stacked` holds one
    matrix of each kind, with the rows of the experts one below the other.

    `held`: which of the layer's experts these are; None for all.
    `biases`: [experts, 2 size] of gate and up, and [experts, hidden] of down, both of the activations' dtype.
    """

    gate_up: tuple[PackedWeight, ...]
    down: tuple[PackedWeight, ...]
    stacked: tuple[Matrix, Matrix] | None = None
    biases: tuple[Tensor, Tensor] | None = None
    swiglu: ClampedSwiGlu | None = None
    held: range | None = None


def pack_experts(
    pairs: Iterable[tuple[Stored, Stored]], dtype: torch.dtype, is_resident: bool = False
) -> PackedExperts:
    """Prepare each expert's gate_up and down for activations of `dtype`; a CPU packs them one after the other, see
    `pack`.

    All experts are stored alike. `is_resident`: see `weft_kernels.packed.on_device`.
    """
    gate_ups: list[PackedWeight] = []
    downs: list[PackedWeight] = []
    on_gpu: list[tuple[Stored, Stored]] = []
    for pair in pairs:
        if pair[0].device.type == "cuda":
            on_gpu.append(pair)
            continue
        gate_up, down = (pack(on_device(each, dtype, is_resident), dtype, is_resident) for each in pair)
        gate_ups.append(gate_up)
        downs.append(down)
    if not on_gpu:
        return PackedExperts(tuple(gate_ups), tuple(downs))
    stacks = [
        on_device(_in_dtype(stack(each, dtype=dtype), dtype), dtype, is_resident) for each in zip(*on_gpu, strict=True)
    ]
    return PackedExperts((), (), (stacks[0], stacks[1]))


def _in_dtype(weight: Stored, dtype: torch.dtype) -> Stored:
    return weight.to(dtype) if isinstance(weight, Tensor) else weight


def moe_grouped(x: Tensor, chosen: Tensor, weights: Tensor, experts: PackedExperts, is_on_input: bool) -> Tensor:
    num_rows, top_k = chosen.shape
    order = chosen.flatten().argsort(stable=True)
    sorted_weights = weights.flatten()[order, None]
    into = x[order // top_k]
    if is_on_input:
        into = (into * sorted_weights).to(x.dtype)
    make = torch.empty if experts.held is None else torch.zeros
    out = make(len(order), x.shape[1], dtype=torch.float32, device=x.device)
    first = 0
    counts = chosen.flatten().bincount(minlength=len(experts.down))[: len(experts.down)]
    for expert, count in enumerate(counts.tolist()):
        if count:
            rows = slice(first, first + count)
            biases = [each[expert] for each in experts.biases] if experts.biases else [None, None]
            gate_up = linear(into[rows], experts.gate_up[expert], biases[0])
            middle = experts.swiglu(*gate_up.chunk(2, dim=-1)) if experts.swiglu else silu_mul(gate_up)
            out[rows] = linear(middle, experts.down[expert], biases[1])
            first += count
    if not is_on_input:
        out *= sorted_weights
    unsorted = torch.empty_like(out)
    unsorted[order] = out
    return unsorted.view(num_rows, top_k, x.shape[1]).sum(1).to(x.dtype)


def moe_reference(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    is_on_input: bool,
    biases: tuple[Tensor, Tensor] | None = None,
    swiglu: ClampedSwiGlu | None = None,
) -> Tensor:
    gate_up_bias, down_bias = biases or (gate_up.new_zeros(gate_up.shape[:2]), down.new_zeros(down.shape[:2]))
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for row in range(len(x)):
        for expert, weight in zip(chosen[row].tolist(), weights[row], strict=True):
            into = x[row].float() * weight if is_on_input else x[row].float()
            gate, up = (gate_up[expert].float() @ into + gate_up_bias[expert]).chunk(2)
            middle = swiglu(gate, up) if swiglu else functional.silu(gate) * up
            expert_out = down[expert].float() @ middle + down_bias[expert]
            out[row] += expert_out if is_on_input else expert_out * weight
    return out.to(x.dtype)
