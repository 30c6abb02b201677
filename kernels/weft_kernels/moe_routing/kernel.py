"""Routes in one launch, one program per row: it reads each logit once and sorts nothing."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft_kernels.moe_routing import LEAST_SUM, RoutingConfig


def route_kernel(logits: Tensor, bias: Tensor | None, rule: RoutingConfig) -> tuple[Tensor, Tensor]:
    """Route on a GPU; ties go to the lower expert number."""
    num_rows, num_experts = logits.shape
    assert logits.is_contiguous()
    assert bias is None or (bias.dtype == torch.float32 and bias.is_contiguous())
    num_groups = 1 if bias is None else rule.num_groups
    assert num_experts % num_groups == 0
    assert rule.top_k <= num_experts
    chosen = torch.empty(num_rows, rule.top_k, dtype=torch.int64, device=logits.device)
    weights = torch.empty(num_rows, rule.top_k, dtype=torch.float32, device=logits.device)
    size = num_experts // num_groups
    if num_rows:
        _route[(num_rows,)](
            logits,
            logits if bias is None else bias,
            chosen,
            weights,
            rule.factor,
            LEAST_SUM,
            TOP_K=rule.top_k,
            NUM_GROUPS=num_groups,
            TOP_GROUPS=min(num_groups, rule.top_groups),
            SIZE=size,
            BLOCK_G=triton.next_power_of_2(num_groups),
            BLOCK_E=triton.next_power_of_2(size),
            BLOCK_K=triton.next_power_of_2(rule.top_k),
            SOFTMAX=rule.is_softmax,
            RENORMALISED=rule.is_renormalised,
            BIASED=bias is not None,
            num_warps=1 if num_experts <= 128 else 4,
        )
    return chosen, weights


@triton.jit
def _route(
    p_logits: tl.tensor,
    p_bias: tl.tensor,
    p_chosen: tl.tensor,
    p_weights: tl.tensor,
    factor: tl.tensor,
    least_sum: tl.tensor,
    TOP_K: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SOFTMAX: tl.constexpr,
    RENORMALISED: tl.constexpr,
    BIASED: tl.constexpr,
) -> None:
    i_row = tl.program_id(0).to(tl.int64)
    o_group = tl.arange(0, BLOCK_G)
    o_k = tl.arange(0, BLOCK_K)
    # [BLOCK_G, BLOCK_E]: experts, a line a group
    o_expert = o_group[:, None] * SIZE + tl.arange(0, BLOCK_E)[None, :]
    m_expert = (o_group < NUM_GROUPS)[:, None] & (tl.arange(0, BLOCK_E) < SIZE)[None, :]
    nothing = float("-inf")
    p_row = p_logits + i_row * NUM_GROUPS * SIZE
    b_logit = tl.load(p_row + o_expert, mask=m_expert, other=nothing).to(tl.float32)
    b_score = tl.sigmoid(b_logit)
    if SOFTMAX:
        b_power = tl.exp(b_logit - tl.max(tl.max(b_logit, 1), 0))
        b_score = b_power / tl.sum(tl.sum(b_power, 1), 0)
    b_candidate = b_logit
    if BIASED:
        b_biased = b_score + tl.load(p_bias + o_expert, mask=m_expert, other=0.0)
        b_candidate = tl.where(m_expert, b_biased, nothing)
        if TOP_GROUPS < NUM_GROUPS:
            b_candidate = _in_best_groups(b_candidate, o_group, o_expert, TOP_GROUPS, NUM_GROUPS, SIZE)
    b_chosen = tl.zeros([BLOCK_K], tl.int32)
    b_weight = tl.zeros([BLOCK_K], tl.float32)
    for k in tl.static_range(TOP_K):
        best = tl.max(tl.max(b_candidate, 1), 0)
        i_best = tl.min(tl.min(tl.where(b_candidate == best, o_expert, NUM_GROUPS * SIZE), 1), 0)
        # If no candidate equals the best, it is NaN; still choose a valid expert.
        i_best = tl.minimum(i_best, NUM_GROUPS * SIZE - 1)
        weight = tl.sum(tl.sum(tl.where(o_expert == i_best, b_score, 0.0), 1), 0)
        b_chosen = tl.where(o_k == k, i_best, b_chosen)
        b_weight = tl.where(o_k == k, weight, b_weight)
        b_candidate = tl.where(o_expert == i_best, nothing, b_candidate)
    if RENORMALISED:
        b_weight = b_weight / (tl.sum(b_weight, 0) + least_sum)
    m_k = o_k < TOP_K
    tl.store(p_chosen + i_row * TOP_K + o_k, b_chosen.to(tl.int64), mask=m_k)
    tl.store(p_weights + i_row * TOP_K + o_k, b_weight * factor, mask=m_k)


@triton.jit
def _in_best_groups(
    b_candidate: tl.tensor,
    o_group: tl.tensor,
    o_expert: tl.tensor,
    TOP_GROUPS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
) -> tl.tensor:
    """Return [BLOCK_G, BLOCK_E] with -inf for experts outside the best TOP_GROUPS groups."""
    nothing = float("-inf")
    # [BLOCK_G]: the sum of the best two of each group; ties count twice
    b_best = tl.max(b_candidate, 1)
    b_at = tl.min(tl.where(b_candidate == b_best[:, None], o_expert, NUM_GROUPS * SIZE), 1)
    b_group = b_best + tl.max(tl.where(o_expert == b_at[:, None], nothing, b_candidate), 1)
    m_in = o_group < 0
    for _ in tl.static_range(TOP_GROUPS):
        i_best = tl.min(tl.where(b_group == tl.max(b_group, 0), o_group, NUM_GROUPS), 0)
        m_in = m_in | (o_group == i_best)
        b_group = tl.where(o_group == i_best, nothing, b_group)
    return tl.where(m_in[:, None], b_candidate, nothing)
