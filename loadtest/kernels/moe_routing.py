"""A router's choice of experts, beside torch's way. `python -m loadtest.kernels.moe_routing`"""

from __future__ import annotations

import sys

import torch

from loadtest.kernels.roofline import Work, report
from weft_kernels.moe_routing import RoutingConfig, route, route_reference

# experts, rule, whether there is a bias
MODELS = {
    "Qwen3-MoE": (128, RoutingConfig(8, True, True), False),
    "Llama 4 Scout": (16, RoutingConfig(1, False), False),
    "DeepSeek-V3": (256, RoutingConfig(8, False, True, 8, 4, 2.5), True),
    "Kimi K2": (384, RoutingConfig(8, False, True, 1, 1, 2.827), True),
}


def works() -> list[Work]:
    """A decode step's rows and a prompt's."""
    return [make_work(name, rows) for name in MODELS for rows in (1, 64, 2048)]


def make_work(name: str, rows: int) -> Work:
    """Logits read, experts and weights written; a launch takes longer than that."""
    num_experts, rule, has_bias = MODELS[name]
    logits = torch.randn(rows, num_experts, device="cuda")
    bias = torch.randn(num_experts, device="cuda") if has_bias else None
    num_bytes = logits.nbytes + rows * rule.top_k * 12.0
    return Work(
        f"{name}, {rows} rows",
        lambda: route(logits, bias, rule),
        num_bytes,
        0,
        lambda: route_reference(logits, bias, rule),
    )


if __name__ == "__main__":
    sys.exit(report("routing", works))
