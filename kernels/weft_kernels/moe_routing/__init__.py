"""Chooses the experts of each token, and their weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft_kernels.activations import sigmoid

# Keeps the sum of the weights above 0.
LEAST_SUM = 1e-20


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """Routing of a model family: scores are softmax or sigmoid of all logits; the `top_k` chosen scores are the
    weights.

    With a bias, experts come from the `top_groups` best of `num_groups`. A group's score is the sum of its best two.
    """

    top_k: int
    is_softmax: bool
    is_renormalised: bool = False
    num_groups: int = 1
    top_groups: int = 1
    factor: float = 1.0


def route_reference(logits: Tensor, bias: Tensor | None, rule: RoutingConfig) -> tuple[Tensor, Tensor]:
    logits = logits.float()
    scores = logits.softmax(-1) if rule.is_softmax else sigmoid(logits)
    # Scores may round to the same value; the larger logit still wins.
    candidates = logits if bias is None else _of_best_groups(scores + bias, rule)
    chosen = candidates.topk(rule.top_k, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if rule.is_renormalised:
        weights = weights / (weights.sum(-1, keepdim=True) + LEAST_SUM)
    return chosen, weights * rule.factor


def _of_best_groups(biased: Tensor, rule: RoutingConfig) -> Tensor:
    """Mask experts of other groups with -inf; with negative biases a 0 would beat experts of the chosen groups."""
    groups = biased.view(len(biased), rule.num_groups, -1)
    best = groups.topk(2, dim=-1).values.sum(-1).topk(rule.top_groups, dim=-1).indices
    is_out = torch.ones(groups.shape[:-1], dtype=torch.bool, device=biased.device).scatter(-1, best, False)
    return groups.masked_fill(is_out[..., None], float("-inf")).flatten(-2)


def route(logits: Tensor, bias: Tensor | None, rule: RoutingConfig) -> tuple[Tensor, Tensor]:
    """Return the `top_k` experts of each row and their weights, [T, k] int64 and float32.

    logits: [T, E] of any float dtype. Without a bias the largest logits are chosen. With a bias [E] float32 the largest
    score + bias within the best groups are chosen; the bias affects the choice only.
    """
    assert bias is None or bias.shape == logits.shape[1:]
    if logits.is_cuda:
        from weft_kernels.moe_routing.kernel import route_kernel

        return route_kernel(logits, bias, rule)
    return route_reference(logits, bias, rule)
