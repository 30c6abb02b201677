"""The grouped kernels give what one row and one expert at a time would."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.device import DEVICE, DTYPES, close

pytest.importorskip("triton")

from weft_kernels.moe import ClampedSwiGlu, moe, moe_reference, pack_experts
from weft_kernels.moe.kernel import moe_kernel


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_on_input", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "num_experts", "top_k", "hidden", "size"),
    [(1, 1, 1, 16, 16), (1, 6, 3, 40, 20), (7, 5, 2, 33, 70), (90, 4, 2, 64, 24), (3, 40, 8, 24, 17), (0, 4, 2, 8, 8)],
)
def test_mixtures_of_all_sizes(
    num_rows: int, num_experts: int, top_k: int, hidden: int, size: int, is_on_input: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(num_rows + size)
    x = torch.randn(num_rows, hidden, generator=generator).to(dtype)
    gate_up = (torch.randn(num_experts, 2 * size, hidden, generator=generator) * hidden**-0.5).to(dtype)
    down = (torch.randn(num_experts, hidden, size, generator=generator) * size**-0.5).to(dtype)
    scores = torch.rand(num_rows, num_experts, generator=generator)
    scores[: num_rows // 2, 0] += 1  # one expert is busier than the others
    weights, chosen = scores.topk(top_k, dim=-1)
    arguments = [each.to(DEVICE) for each in (x, chosen, weights, gate_up, down)]
    found = moe_kernel(arguments[0], arguments[1], arguments[2], arguments[3], arguments[4], is_on_input)
    close(found.cpu(), moe_reference(x, chosen, weights, gate_up, down, is_on_input), factor=3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_on_input", [False, True])
@pytest.mark.parametrize(("num_rows", "hidden", "size"), [(3, 33, 20), (40, 72, 70)])
def test_biases_and_clamped_swiglu_are_the_reference(
    num_rows: int, hidden: int, size: int, is_on_input: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(size)
    shapes = (num_rows, hidden), (5, 2 * size, hidden), (5, hidden, size), (5, 2 * size), (5, hidden)
    x, gate_up, down, *biases = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    gate_up, down, swiglu = gate_up * hidden**-0.5, down * size**-0.5, ClampedSwiGlu(1.7, 1.5)
    weights, chosen = torch.rand(num_rows, 5, generator=generator).topk(2, dim=-1)
    inputs = [each.to(DEVICE) for each in (x, chosen, weights, gate_up, down)]
    on_device = biases[0].to(DEVICE), biases[1].to(DEVICE)
    found = moe_kernel(inputs[0], inputs[1], inputs[2], inputs[3], inputs[4], is_on_input, on_device, swiglu)
    expected = moe_reference(x, chosen, weights, gate_up, down, is_on_input, (biases[0], biases[1]), swiglu)
    close(found.cpu(), expected, factor=3)


def test_experts_that_nobody_chose_are_not_read() -> None:
    x = torch.randn(5, 24, device=DEVICE)
    gate_up, down = torch.randn(4, 40, 24, device=DEVICE), torch.randn(4, 24, 20, device=DEVICE)
    chosen, weights = torch.full((5, 1), 2, device=DEVICE), torch.ones(5, 1, device=DEVICE)
    expected = moe_kernel(x, chosen, weights, gate_up, down, False)
    gate_up[[0, 1, 3]], down[[0, 1, 3]] = float("nan"), float("nan")
    assert torch.equal(moe_kernel(x, chosen, weights, gate_up, down, False), expected)


def test_a_row_gives_the_same_alone_and_among_others_of_its_kind() -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(6, 32, generator=generator).to(DEVICE)
    gate_up = torch.randn(3, 32, 32, generator=generator).to(DEVICE)
    down = torch.randn(3, 32, 16, generator=generator).to(DEVICE)
    weights, chosen = torch.rand(6, 3, generator=generator).to(DEVICE).topk(2, dim=-1)
    together = moe_kernel(x, chosen, weights, gate_up, down, False)
    for row in range(6):
        one = slice(row, row + 1)
        close(moe_kernel(x[one], chosen[one], weights[one], gate_up, down, False)[0], together[row])


def test_stacked_experts_go_to_the_kernels() -> None:
    x = torch.randn(4, 24, device=DEVICE)
    gate_up, down = torch.randn(3, 40, 24, device=DEVICE), torch.randn(3, 24, 20, device=DEVICE)
    weights, chosen = torch.rand(4, 3, device=DEVICE).topk(2, dim=-1)
    packed = replace(pack_experts(zip(gate_up, down, strict=True), torch.float32), stacked=(gate_up, down))
    assert torch.equal(moe(x, chosen, weights, packed, True), moe_kernel(x, chosen, weights, gate_up, down, True))


def test_parts_of_the_experts_add_up_to_all_of_them() -> None:
    x = torch.randn(9, 24, device=DEVICE)
    gate_up, down = torch.randn(5, 40, 24, device=DEVICE), torch.randn(5, 24, 20, device=DEVICE)
    weights, chosen = torch.rand(9, 5, device=DEVICE).topk(2, dim=-1)
    parts = []
    for held in (range(3), range(3, 5)):
        stacked = gate_up[held.start : held.stop].contiguous(), down[held.start : held.stop].contiguous()
        packed = replace(pack_experts(zip(*stacked, strict=True), torch.float32), stacked=stacked, held=held)
        parts.append(moe(x, chosen, weights, packed, False))
    close(parts[0] + parts[1], moe_kernel(x, chosen, weights, gate_up, down, False), factor=3)
