"""Chooses the experts of each token, and their weights."""

from __future__ import annotations

from torch import Tensor

from weft_kernels.moe_routing.reference import RoutingConfig as RoutingConfig
from weft_kernels.moe_routing.reference import route_reference


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
