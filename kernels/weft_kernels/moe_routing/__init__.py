"""Which experts see a token, and with what weight."""

from __future__ import annotations

from torch import Tensor

from weft_kernels.moe_routing.reference import RoutingConfig as RoutingConfig
from weft_kernels.moe_routing.reference import route_reference


def route(logits: Tensor, bias: Tensor | None, rule: RoutingConfig) -> tuple[Tensor, Tensor]:
    """The `top_k` experts of each row and their weights, [T, k] int64 and float32.

    logits: [T, E] of any float dtype. Without a bias the largest logits are chosen; with one, [E] float32, which takes
    part in the choice only, the largest of score + bias within the best groups.
    """
    assert bias is None or bias.shape == logits.shape[1:]
    if logits.is_cuda:
        from weft_kernels.moe_routing.kernel import route_kernel

        return route_kernel(logits, bias, rule)
    return route_reference(logits, bias, rule)
