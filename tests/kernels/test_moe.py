"""Experts' rows taken together give what the reference defines for one row at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from weft_kernels.moe import ClampedSwiGlu, moe, moe_reference, pack_experts

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.mark.parametrize("is_on_input", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "num_experts", "top_k"), [(1, 1, 1), (1, 7, 3), (5, 4, 4), (33, 6, 2), (0, 3, 2), (3, 64, 1)]
)
def test_grouped_experts_are_the_reference_in_fp32(
    num_rows: int, num_experts: int, top_k: int, is_on_input: bool
) -> None:
    x, chosen, weights, gate_up, down = make_inputs(num_rows, num_experts, top_k, torch.float32)
    out = moe(x, chosen, weights, pack_experts(zip(gate_up, down, strict=True), torch.float32), is_on_input)
    expected = moe_reference(x, chosen, weights, gate_up, down, is_on_input)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_experts_of_bf16_are_the_reference(dtype: torch.dtype) -> None:
    x, chosen, weights, gate_up, down = make_inputs(9, 5, 2, torch.bfloat16)
    out = moe(x.to(dtype), chosen, weights, pack_experts(zip(gate_up, down, strict=True), dtype), False)
    assert out.dtype == dtype
    expected = moe_reference(x.to(dtype), chosen, weights, gate_up, down, False)
    rounding = 1e-5 if dtype == torch.float32 else 3e-2  # weights alone in bf16 lose nothing
    torch.testing.assert_close(out, expected, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("is_on_input", [False, True])
def test_biases_and_clamped_swiglu_are_the_reference(is_on_input: bool) -> None:
    x, chosen, weights, gate_up, down = make_inputs(33, 6, 2, torch.float32)
    biases, swiglu = (torch.randn(6, 12), torch.randn(6, 10)), ClampedSwiGlu(1.7, 2.0)
    packed = pack_experts(zip(gate_up, down, strict=True), torch.float32)
    found = moe(x, chosen, weights, replace(packed, biases=biases, swiglu=swiglu), is_on_input)
    expected = moe_reference(x, chosen, weights, gate_up, down, is_on_input, biases, swiglu)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_parts_of_the_experts_add_up_to_all_of_them() -> None:
    x, chosen, weights, gate_up, down = make_inputs(33, 6, 3, torch.float32)
    parts = []
    for held in (range(2), range(2, 5), range(5, 6)):
        pairs = zip(gate_up[held.start : held.stop], down[held.start : held.stop], strict=True)
        parts.append(moe(x, chosen, weights, replace(pack_experts(pairs, torch.float32), held=held), False))
    expected = moe_reference(x, chosen, weights, gate_up, down, False)
    torch.testing.assert_close(torch.stack(parts).sum(0), expected, rtol=1e-5, atol=1e-5)


def make_inputs(num_rows: int, num_experts: int, top_k: int, dtype: torch.dtype) -> Inputs:
    """Rows of 10, experts of size 6; every row's experts are different ones."""
    source = torch.Generator().manual_seed(num_rows)
    chosen = torch.rand(num_rows, num_experts, generator=source).argsort(-1)[:, :top_k]
    weights = torch.rand(num_rows, top_k, generator=source)
    shapes = (num_rows, 10), (num_experts, 12, 10), (num_experts, 10, 6)
    x, gate_up, down = (torch.randn(shape, generator=source).to(dtype) for shape in shapes)
    return x, chosen, weights, gate_up, down
