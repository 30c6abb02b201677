"""What a router's logits mean, in float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Keeps a sum of weights from being nothing.
LEAST_SUM = 1e-20


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """A family's way: scores are softmax or sigmoid of all logits, the weights those of the `top_k` chosen.

    With a bias, experts are chosen of the `top_groups` best of `num_groups`; a group counts as much as its best two.
    """

    top_k: int
    is_softmax: bool
    is_renormalised: bool = False
    num_groups: int = 1
    top_groups: int = 1
    factor: float = 1.0


def route_reference(logits: Tensor, bias: Tensor | None, rule: RoutingConfig) -> tuple[Tensor, Tensor]:
    """See `weft_kernels.moe_routing.route`."""
    logits = logits.float()
    scores = logits.softmax(-1) if rule.is_softmax else logits.sigmoid()
    # of scores that round to the same, the larger logit is still the better one
    candidates = logits if bias is None else _of_best_groups(scores + bias, rule)
    chosen = candidates.topk(rule.top_k, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if rule.is_renormalised:
        weights = weights / (weights.sum(-1, keepdim=True) + LEAST_SUM)
    return chosen, weights * rule.factor


def _of_best_groups(biased: Tensor, rule: RoutingConfig) -> Tensor:
    """Others are out: with negative biases, 0 would beat experts of the chosen groups."""
    groups = biased.view(len(biased), rule.num_groups, -1)
    best = groups.topk(2, dim=-1).values.sum(-1).topk(rule.top_groups, dim=-1).indices
    is_out = torch.ones(groups.shape[:-1], dtype=torch.bool, device=biased.device).scatter(-1, best, False)
    return groups.masked_fill(is_out[..., None], float("-inf")).flatten(-2)
