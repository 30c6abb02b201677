"""FP8 and INT4 weights as they are stored, beside torch's bfloat16: DeepSeek's dense matrices, Kimi's experts.

python -m loadtest.kernels.quantized
"""

from __future__ import annotations

import sys
from functools import partial

import torch
from torch.nn import functional

from loadtest.kernels.roofline import Work, report
from weft_kernels.packed import Fp8, Int4

# outputs, inputs: down to the queries' rank, up from it, output, dense gate and up, dense down
DENSE = {
    "q_a": (1536, 7168),
    "q_b": (24_576, 1536),
    "o": (7168, 16_384),
    "gate up": (36_864, 7168),
    "down": (7168, 18_432),
}
# of Kimi K2.5 on one GPU of eight: experts, chosen of them on average, hidden, expert's size
EXPERTS = (48, 1, 7168, 2048)
ROWS = (1, 8, 64, 256, 1024)
GROUP = 32
# without this bit no byte is one
NAN_BITS = 0x01010101


def works() -> list[Work]:
    """Of all matrices and both kinds of packing."""
    dense = [dense_work(name, kind, rows) for name in DENSE for kind in ("FP8", "INT4") for rows in ROWS]
    return [*dense, *(expert_work(kind, rows) for kind in ("FP8", "INT4") for rows in ROWS)]


def random_matrix(kind: str, outputs: int, inputs: int) -> Fp8 | Int4:
    """Any words are weights, but for those that hold a NaN."""
    if kind == "FP8":
        words = torch.randint(-(2**31), 2**31 - 1, (outputs, inputs // 4), dtype=torch.int32, device="cuda")
        factors = torch.rand(-(-outputs // 128), -(-inputs // 128), device="cuda")
        return Fp8(inputs, words & ~NAN_BITS, factors, (128, 128))
    words = torch.randint(-(2**31), 2**31 - 1, (outputs, inputs // 8), dtype=torch.int32, device="cuda")
    return Int4(inputs, words, torch.rand(outputs, inputs // GROUP, device="cuda").bfloat16(), GROUP)


def dense_work(name: str, kind: str, rows: int) -> Work:
    """Raises AssertionError where the kernel is further from the unpacked matrix than bfloat16 is."""
    from weft_kernels.packed.linear import linear_packed

    outputs, inputs = DENSE[name]
    weight, x = random_matrix(kind, outputs, inputs), torch.randn(rows, inputs, device="cuda").bfloat16()
    plain = weight.unpack().bfloat16()
    expected = functional.linear(x, plain)
    assert (linear_packed(x, weight) - expected).float().norm() < 1e-2 * expected.float().norm(), (name, kind, rows)
    call, torch_call = partial(linear_packed, x, weight), partial(functional.linear, x, plain)
    return Work(f"{kind} {name}, {rows} rows", call, weight.nbytes, 2.0 * rows * outputs * inputs, torch_call)


def expert_work(kind: str, rows: int) -> Work:
    """The weights of the experts that are chosen by chance, read once."""
    from weft_kernels.moe.kernel import moe_kernel

    num_experts, top_k, hidden, size = EXPERTS
    gate_up = random_matrix(kind, num_experts * 2 * size, hidden)
    down = random_matrix(kind, num_experts * hidden, size)
    x = torch.randn(rows, hidden, device="cuda").bfloat16() * 1e-3
    weights, chosen = torch.rand(rows, num_experts, device="cuda").topk(top_k, dim=-1)
    share = len(set(chosen.flatten().tolist())) / num_experts
    call = partial(moe_kernel, x, chosen, weights, gate_up, down, False)
    num_bytes = (gate_up.nbytes + down.nbytes) * share
    return Work(f"{kind} experts, {rows} rows", call, num_bytes, 6.0 * hidden * size * rows * top_k)


if __name__ == "__main__":
    sys.exit(report("quantized weights", works))
