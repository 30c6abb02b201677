"""The router's kernel chooses and weighs as the reference does; models on it are judged beside transformers."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.device import DEVICE, DTYPES

pytest.importorskip("triton")

from weft_kernels.moe_routing import RoutingConfig, route_reference
from weft_kernels.moe_routing.kernel import route_kernel

# experts and rule: Mixtral, Qwen3-MoE raw, Llama 4, DeepSeek-V3, Kimi K2, and sizes that are no powers of two
RULES = [
    (8, RoutingConfig(2, True, True)),
    (128, RoutingConfig(8, True)),
    (16, RoutingConfig(1, False)),
    (256, RoutingConfig(8, False, True, 8, 4, 2.5)),
    (384, RoutingConfig(8, False, True, 1, 1, 2.827)),
    (21, RoutingConfig(5, False, True, 7, 3, 1.5)),
    (5, RoutingConfig(5, True)),
    (6, RoutingConfig(2, False, False, 3, 1)),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_experts", "rule"), RULES)
def test_all_families_rules(num_experts: int, rule: RoutingConfig, dtype: torch.dtype) -> None:
    source = torch.Generator().manual_seed(num_experts)
    logits = (3 * torch.randn(9, num_experts, generator=source)).to(dtype)
    has_bias = rule.num_groups > 1 or rule.factor != 1
    # negative ones too: an expert that is out must not come back as a zero
    bias = torch.randn(num_experts, generator=source) - 1 if has_bias else None
    expected, expected_weights = route_reference(logits, bias, rule)
    chosen, weights = check(logits, bias, rule)
    if dtype == torch.float32:  # others are rounded, and often equal: there the weights tell
        assert chosen.sort(-1).values.tolist() == expected.sort(-1).values.tolist()
    torch.testing.assert_close(weights.sort(-1).values, expected_weights.sort(-1).values, rtol=1e-5, atol=1e-6)


def check(logits: torch.Tensor, bias: torch.Tensor | None, rule: RoutingConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel's answer, whose weights belong to its experts."""
    on_device = None if bias is None else bias.to(DEVICE)
    chosen, weights = (each.cpu() for each in route_kernel(logits.to(DEVICE), on_device, rule))
    assert chosen.dtype == torch.int64
    assert all(len(set(row)) == rule.top_k for row in chosen.tolist())
    scores = logits.float().softmax(-1) if rule.is_softmax else logits.float().sigmoid()
    expected = scores.gather(-1, chosen)
    if rule.is_renormalised:
        expected = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(weights, expected * rule.factor, rtol=1e-5, atol=1e-6)
    return chosen, weights


def test_of_equals_the_first_is_chosen_and_the_larger_logit_where_scores_round_to_one() -> None:
    chosen, _ = check(torch.zeros(1, 6), None, RoutingConfig(3, True))
    assert chosen.tolist() == [[0, 1, 2]]
    chosen, _ = check(torch.tensor([[40.0, 60.0, 50.0]]), None, RoutingConfig(1, False))
    assert chosen.tolist() == [[1]]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_no_rows_and_numbers_that_are_none() -> None:
    chosen, weights = route_kernel(torch.empty(0, 4, device=DEVICE), None, RoutingConfig(2, True))
    assert chosen.shape == weights.shape == (0, 2)
    broken = torch.full((1, 6), float("nan"), device=DEVICE)
    chosen, _ = route_kernel(broken, None, RoutingConfig(2, True))
    assert all(0 <= each < 6 for each in chosen[0].tolist())  # memory that is there, whatever comes of it
