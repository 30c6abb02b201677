"""Experts' grouped products: shapes of one GPU's share. `python -m loadtest.kernels.moe`"""

from __future__ import annotations

import sys

import torch

from loadtest.kernels.roofline import Work, report

# experts on the GPU, chosen of them, hidden, expert's size: Qwen3-30B-A3B, Scout at TP 2, Kimi K2 at EP 64
SHAPES = {"Qwen3-30B-A3B": (128, 8, 2048, 768), "Scout/2": (16, 1, 5120, 4096), "Kimi K2/64": (6, 2, 7168, 2048)}


def works() -> list[Work]:
    """A decode step's rows and a prompt's."""
    return [make_work(name, rows) for name in SHAPES for rows in (1, 8, 64, 2048)]


def make_work(name: str, rows: int) -> Work:
    """The weights of the experts that are chosen by chance, read once; two operations for each weight and row."""
    from weft_kernels.moe.kernel import moe_kernel

    num_experts, top_k, hidden, size = SHAPES[name]
    gate_up = torch.randn(num_experts, 2 * size, hidden, device="cuda", dtype=torch.bfloat16)
    down = torch.randn(num_experts, hidden, size, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
    weights, chosen = torch.rand(rows, num_experts, device="cuda").topk(top_k, dim=-1)
    expert = 3 * hidden * size
    return Work(
        f"{name}, {rows} rows",
        lambda: moe_kernel(x, chosen, weights, gate_up, down, False),
        2.0 * expert * len(set(chosen.flatten().tolist())) + 2 * x.nbytes,
        2.0 * expert * rows * top_k,
    )


if __name__ == "__main__":
    sys.exit(report("mixture of experts", works))
