"""Which experts see a token, and with what weight: the rules of each family, in float32."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.model.spec import Experts, Scoring
from weft_kernels.linear import PackedWeight, linear


def route(x: Tensor, router: PackedWeight, bias: Tensor | None, experts: Experts) -> tuple[Tensor, Tensor]:
    """x [T, hidden], router [E, hidden], bias [E]: the chosen experts [T, k] int64 and their weights [T, k] float32."""
    logits = linear(x.to(router.dtype), router)
    if experts.scoring is Scoring.SOFTMAX:
        return _softmax(logits, experts)
    if experts.scoring is Scoring.SIGMOID_INPUT:
        best, chosen = logits.topk(experts.top_k, dim=-1)
        return chosen, best.float().sigmoid()
    assert bias is not None
    return _sigmoid_groups(logits, bias, experts)


def _softmax(logits: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    weights, chosen = logits.softmax(-1, dtype=torch.float32).topk(experts.top_k, dim=-1)
    if experts.is_renormalised:
        weights = weights / weights.sum(-1, keepdim=True)
    return chosen, weights


def _sigmoid_groups(logits: Tensor, bias: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    """The bias takes part in the choice only. A group counts as much as its best two."""
    scores = logits.float().sigmoid()
    groups = (scores + bias).view(len(scores), experts.num_groups, scores.shape[-1] // experts.num_groups)
    best = groups.topk(2, dim=-1).values.sum(-1).topk(experts.top_groups, dim=-1).indices
    is_out = torch.ones(groups.shape[:-1], dtype=torch.bool, device=logits.device).scatter(-1, best, False)
    # with negative biases, 0 would beat experts of the chosen groups
    candidates = groups.masked_fill(is_out[..., None], float("-inf")).flatten(-2)
    chosen = candidates.topk(experts.top_k, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if experts.is_renormalised:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return chosen, weights * experts.factor
