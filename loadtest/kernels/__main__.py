"""Kernels alone on a GPU, beside the limits of the device and torch's own way.

    python -m loadtest.kernels                          all of them
    python -m loadtest.kernels rms_norm paged_attention

Names are those of `weft_kernels`; `quantized` is FP8 and INT4 weights. A bare GPU machine with torch and triton is
enough. `loadtest.kernels.f12` measures F12 beside cuBLAS, `loadtest.kernels.linear` linear layers on a CPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from loadtest.kernels.roofline import Work, print_works
from weft_kernels.block_copy import gather_blocks, gather_blocks_reference, scatter_blocks, scatter_blocks_reference
from weft_kernels.latent_kv import latent_kv, latent_kv_reference
from weft_kernels.layer_cache import uniform_pool
from weft_kernels.moe_routing import RoutingConfig, route, route_reference
from weft_kernels.packed import Fp8, Int4
from weft_kernels.paged_attention.device_batch import MAX_DECODE_ROWS, AttentionShape, PagedTensors
from weft_kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_reference
from weft_kernels.rope_kv import ROTATED, HeadTransform, rope_kv, rope_kv_reference
from weft_kernels.sampling import SamplingRows, sample
from weft_kernels.sampling.reference import sample_reference
from weft_kernels.silu_mul import silu_mul, silu_mul_reference

BF16 = torch.bfloat16
BLOCK_TOKENS = 64
# rows of a decode step of one and of 64 sequences, and of two prompts
ROWS = (1, 64, 2048, 8192)
# query heads, key heads, dim: one GPU's share of an 8B and of a 70B model at TP 8; 0 key heads: a latent of 512 + 64
ATTENTION_HEADS = {"8B": (32, 8, 128), "70B/8": (8, 1, 128), "latent": (16, 0, 576)}
# sequences, new rows of each, context of each
DECODES = [(1, 1, 1024), (8, 1, 1024), (32, 1, 1024), (256, 1, 1024), (1, 1, 32768), (32, 1, 32768), (32, 4, 1024)]
PREFILLS = [(1, 512, 512), (1, 2048, 2048), (1, 8192, 8192), (1, 2048, 32768), (8, 512, 512)]
# experts on the GPU, chosen of them, hidden, expert's size: Qwen3-30B-A3B, Scout at TP 2, Kimi K2 at EP 64
EXPERTS = {"Qwen3-30B-A3B": (128, 8, 2048, 768), "Scout/2": (16, 1, 5120, 4096), "Kimi K2/64": (6, 2, 7168, 2048)}
# experts, rule, whether there is a bias
ROUTERS = {
    "Qwen3-MoE": (128, RoutingConfig(8, True, True), False),
    "Llama 4 Scout": (16, RoutingConfig(1, False), False),
    "DeepSeek-V3": (256, RoutingConfig(8, False, True, 8, 4, 2.5), True),
    "Kimi K2": (384, RoutingConfig(8, False, True, 1, 1, 2.827), True),
}
# DeepSeek's dense matrices, outputs and inputs: down to the queries' rank, up from it, output, dense gate and up, down
DENSE = {
    "q_a": (1536, 7168),
    "q_b": (24_576, 1536),
    "o": (7168, 16_384),
    "gate up": (36_864, 7168),
    "down": (7168, 18_432),
}
# Kimi K2.5 on one GPU of eight: experts, chosen of them on average, hidden, expert's size
PACKED_EXPERTS = (48, 1, 7168, 2048)
PACKED_ROWS = (1, 8, 64, 256, 1024)
GROUP = 32
# without this bit no byte is a NaN
NAN_BITS = 0x01010101
VOCABULARY = 128_256
# temperature, top-k, top-p
SAMPLERS = {"plain": (1.0, 0, 1.0), "top-k": (1.0, 50, 1.0), "top-p": (1.0, 0, 0.9), "top-k, top-p": (1.0, 50, 0.9)}


def normal(*shape: int) -> Tensor:
    """Return normal bfloat16 values on the GPU."""
    return torch.randn(*shape, device="cuda", dtype=BF16)


def block_copy() -> Iterator[Work]:
    """Blocks of 8 MiB of an 8B model to and from a contiguous buffer: a short prompt, 4k and 16k tokens."""
    pool = torch.zeros(512, 8, 32, 2, 64, 128, device="cuda", dtype=BF16)
    for count in (4, 64, 256):
        blocks = torch.randperm(len(pool), device="cuda")[:count]
        buffer = gather_blocks(pool, blocks)
        gather, gather_torch = partial(gather_blocks, pool, blocks), partial(gather_blocks_reference, pool, blocks)
        yield Work(f"gather {count} blocks", gather, 2 * buffer.nbytes, 0, gather_torch)
        scatter = partial(scatter_blocks, buffer, pool, blocks)
        scatter_torch = partial(scatter_blocks_reference, buffer, pool, blocks)
        yield Work(f"scatter {count} blocks", scatter, 2 * buffer.nbytes, 0, scatter_torch)


def rms_norms() -> Iterator[Work]:
    """Hidden sizes of an 8B and a 70B model, without and with the residual's addition."""
    for hidden in (4096, 8192):
        for rows in ROWS:
            (x, residual), weight = normal(2, rows, hidden), torch.ones(hidden, device="cuda", dtype=BF16)
            plain, plain_torch = partial(rms_norm, x, weight, 1e-5), partial(rms_norm_reference, x, weight, 1e-5)
            yield Work(f"rms_norm [{rows}, {hidden}]", plain, 2 * x.nbytes + weight.nbytes, 0, plain_torch)
            yield Work(
                f"add rms_norm [{rows}, {hidden}]",
                partial(add_rms_norm, x, residual, weight, 1e-5),
                4 * x.nbytes + weight.nbytes,
                0,
                partial(add_rms_norm_torch, x, residual, weight),
            )


def add_rms_norm_torch(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return rms_norm_reference(residual + x, weight, 1e-5)


def silu_muls() -> Iterator[Work]:
    """The gate of a SwiGLU layer of an 8B model's width."""
    for rows in ROWS:
        x = normal(rows, 2 * 14336)
        yield Work(f"silu_mul [{rows}, 14336]", partial(silu_mul, x), 1.5 * x.nbytes, 0, partial(silu_mul_reference, x))


def rope_kvs() -> Iterator[Work]:
    """Heads of an 8B model, rotated only, normed before (Qwen3) or after (Llama 4), and DeepSeek-V3's latents.

    The projection is read once; queries, keys and values are written once.
    """
    q_norm, k_norm = normal(2, 128)
    rules = {
        "rotated": ROTATED,
        "Qwen3": HeadTransform((q_norm, k_norm), eps=1e-6),
        "Llama 4": HeadTransform(is_normed_last=True, eps=1e-5),
    }
    num_heads, kv_heads, dim = 32, 8, 128
    for rows in ROWS:
        num_blocks = max(4, 2 * rows // BLOCK_TOKENS)
        slots = torch.randperm(num_blocks * BLOCK_TOKENS, device="cuda")[:rows]
        qkv, (cos, sin) = normal(rows, num_heads + 2 * kv_heads, dim), normal(2, rows, dim)
        pool = torch.zeros(num_blocks, kv_heads, 2, 2, BLOCK_TOKENS, dim, device="cuda", dtype=BF16)
        for name, rule in rules.items():
            operands = qkv, cos, sin, uniform_pool(pool).layers[1], slots, rule
            yield Work(
                f"rope_kv {rows} rows, {name}",
                partial(rope_kv, *operands),
                2 * qkv.nbytes + cos.nbytes,  # half of each row of angles
                0,
                partial(rope_kv_reference, *operands),
            )
        yield latent_work(rows, num_blocks, slots)


def latent_work(rows: int, num_blocks: int, slots: Tensor) -> Work:
    num_heads, nope, rank, dim = 128, 128, 512, 64
    down, q = normal(rows, rank + dim), normal(rows, num_heads, nope + dim)[..., nope:]
    angles = normal(2, rows, dim)
    pool = torch.zeros(num_blocks, 1, 2, 1, BLOCK_TOKENS, rank + dim, device="cuda", dtype=BF16)
    operands = down, q, normal(rank), 1e-6, (angles[0], angles[1]), uniform_pool(pool).layers[1], slots
    num_bytes = 2 * down.nbytes + 2 * q.numel() * q.itemsize + angles.nbytes // 2
    call, torch_call = partial(latent_kv, *operands), partial(latent_kv_reference, *operands)
    return Work(f"latent_kv {rows} rows, {num_heads} heads", call, num_bytes, 0, torch_call)


def attentions() -> Iterator[Work]:
    """Decode, verification, prefill, windows and latents, in bfloat16."""
    for name, heads in ATTENTION_HEADS.items():
        yield from (attention_work(f"{name} decode", heads, shape) for shape in DECODES)
        yield from (attention_work(f"{name} prefill", heads, shape) for shape in PREFILLS)
    yield attention_work("8B decode, window 4096", ATTENTION_HEADS["8B"], (32, 1, 32768), 4096)
    yield attention_work("8B prefill, window 4096", ATTENTION_HEADS["8B"], (1, 8192, 32768), 4096)


def attention_work(name: str, heads: tuple[int, int, int], batch: tuple[int, int, int], window: int = 0) -> Work:
    """Read all keys of the window once; a row computes with those up to its own. Blocks of sequences are mixed."""
    from weft_kernels.paged_attention.decode import paged_attention_decode
    from weft_kernels.paged_attention.prefill import paged_attention_prefill

    (num_heads, kv_heads, dim), (num_seqs, rows, context) = heads, batch
    num_blocks, is_latent = num_seqs * context // BLOCK_TOKENS, kv_heads == 0
    pool = normal(num_blocks, max(1, kv_heads), 2, 1 if is_latent else 2, BLOCK_TOKENS, dim)
    keys = pool[:, :, 1, 0]
    values = keys[..., :512] if is_latent else pool[:, :, 1, 1]
    q, out = normal(num_seqs * rows, num_heads, dim), normal(num_seqs * rows, num_heads, values.shape[3])
    tables = torch.randperm(num_blocks, dtype=torch.int32, device="cuda").view(num_seqs, -1)
    starts = torch.arange(0, (num_seqs + 1) * rows, rows, dtype=torch.int32, device="cuda")
    tensors = PagedTensors(starts, torch.full_like(starts[1:], context), tables, rows)
    shape = AttentionShape(dim**-0.5, window)
    kernel = paged_attention_decode if rows <= MAX_DECODE_ROWS else paged_attention_prefill
    read = min(context, window + rows) if window else context
    seen = sum(min(context - rows + row + 1, window or context) for row in range(rows))
    stored = dim if is_latent else 2 * dim
    return Work(
        f"{name} {num_seqs} x {rows} @ {context}",
        partial(kernel, q, keys, values, tensors, shape, out),
        2.0 * num_seqs * read * max(1, kv_heads) * stored + q.nbytes + out.nbytes,
        2.0 * num_seqs * seen * num_heads * (dim + values.shape[3]),
    )


def moes() -> Iterator[Work]:
    """Experts' grouped products: the weights of experts that are chosen at random, read once."""
    from weft_kernels.moe.kernel import moe_kernel

    for name, (num_experts, top_k, hidden, size) in EXPERTS.items():
        for rows in (1, 8, 64, 2048):
            gate_up, down = normal(num_experts, 2 * size, hidden), normal(num_experts, hidden, size)
            x, expert = normal(rows, hidden), 3 * hidden * size
            weights, chosen = torch.rand(rows, num_experts, device="cuda").topk(top_k, dim=-1)
            num_bytes = 2.0 * expert * len(set(chosen.flatten().tolist())) + 2 * x.nbytes
            call = partial(moe_kernel, x, chosen, weights, gate_up, down, False)
            yield Work(f"{name}, {rows} rows", call, num_bytes, 2.0 * expert * rows * top_k)


def moe_routings() -> Iterator[Work]:
    """A router's choice: logits read, experts and weights written; a launch takes longer than that."""
    for name, (num_experts, rule, has_bias) in ROUTERS.items():
        for rows in (1, 64, 2048):
            logits = torch.randn(rows, num_experts, device="cuda")
            bias = torch.randn(num_experts, device="cuda") if has_bias else None
            call, torch_call = partial(route, logits, bias, rule), partial(route_reference, logits, bias, rule)
            yield Work(f"{name}, {rows} rows", call, logits.nbytes + rows * rule.top_k * 12.0, 0, torch_call)


def samplings() -> Iterator[Work]:
    """Sampling without a sort, beside the reference that sorts; at least one read of the logits."""
    for name, (temperature, top_k, top_p) in SAMPLERS.items():
        for batch in (1, 32, 256):

            def column(value: float, dtype: torch.dtype, batch: int = batch) -> Tensor:
                return torch.full((batch,), value, dtype=dtype, device="cuda")

            logits = torch.randn(batch, VOCABULARY, device="cuda") * 4
            rows = SamplingRows(
                temperature=column(temperature, torch.float32),
                top_k=column(top_k, torch.int64),
                top_p=column(top_p, torch.float64),
                min_p=column(0, torch.float32),
                seeds=torch.arange(batch, device="cuda"),
                positions=column(100, torch.int64),
                has_top_k=top_k > 0,
                has_top_p=top_p < 1,
            )
            call, torch_call = partial(sample, logits, rows), partial(sample_reference, logits, rows)
            yield Work(f"sample {name}, batch {batch}", call, logits.nbytes, 0, torch_call)


def quantized() -> Iterator[Work]:
    """FP8 and INT4 weights as they are stored: DeepSeek's dense matrices, Kimi's experts."""
    for name in DENSE:
        yield from (dense_work(name, kind, rows) for kind in ("FP8", "INT4") for rows in PACKED_ROWS)
    yield from (expert_work(kind, rows) for kind in ("FP8", "INT4") for rows in PACKED_ROWS)


def random_matrix(kind: str, outputs: int, inputs: int) -> Fp8 | Int4:
    """Return random words; all but those with a NaN are weights."""
    num_words = inputs // (4 if kind == "FP8" else 8)
    words = torch.randint(-(2**31), 2**31 - 1, (outputs, num_words), dtype=torch.int32, device="cuda")
    if kind == "FP8":
        factors = torch.rand(-(-outputs // 128), -(-inputs // 128), device="cuda")
        return Fp8(inputs, words & ~NAN_BITS, factors, (128, 128))
    return Int4(inputs, words, torch.rand(outputs, inputs // GROUP, device="cuda").bfloat16(), GROUP)


def dense_work(name: str, kind: str, rows: int) -> Work:
    """Raises AssertionError where the kernel is further from the unpacked matrix than bfloat16 is."""
    from weft_kernels.packed.linear import linear_packed

    outputs, inputs = DENSE[name]
    weight, x = random_matrix(kind, outputs, inputs), normal(rows, inputs)
    plain = weight.unpack().bfloat16()
    expected = functional.linear(x, plain)
    assert (linear_packed(x, weight) - expected).float().norm() < 1e-2 * expected.float().norm(), (name, kind, rows)
    call, torch_call = partial(linear_packed, x, weight), partial(functional.linear, x, plain)
    return Work(f"{kind} {name}, {rows} rows", call, weight.nbytes, 2.0 * rows * outputs * inputs, torch_call)


def expert_work(kind: str, rows: int) -> Work:
    """Read the weights of experts that are chosen at random once."""
    from weft_kernels.moe.kernel import moe_kernel

    num_experts, top_k, hidden, size = PACKED_EXPERTS
    gate_up, down = random_matrix(kind, num_experts * 2 * size, hidden), random_matrix(kind, num_experts * hidden, size)
    x = normal(rows, hidden) * 1e-3
    weights, chosen = torch.rand(rows, num_experts, device="cuda").topk(top_k, dim=-1)
    num_bytes = (gate_up.nbytes + down.nbytes) * len(set(chosen.flatten().tolist())) / num_experts
    call = partial(moe_kernel, x, chosen, weights, gate_up, down, False)
    return Work(f"{kind} experts, {rows} rows", call, num_bytes, 6.0 * hidden * size * rows * top_k)


KERNELS: dict[str, Callable[[], Iterable[Work]]] = {
    "block_copy": block_copy,
    "moe": moes,
    "moe_routing": moe_routings,
    "paged_attention": attentions,
    "quantized": quantized,
    "rms_norm": rms_norms,
    "rope_kv": rope_kvs,
    "sampling": samplings,
    "silu_mul": silu_muls,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="*", metavar="OP", help=f"of {', '.join(KERNELS)}; default: all")
    names = parser.parse_args().kernels or list(KERNELS)
    if unknown := set(names) - set(KERNELS):
        parser.error(f"no such kernel: {', '.join(sorted(unknown))}; there are {', '.join(KERNELS)}")
    if not torch.cuda.is_available():
        parser.exit(message="kernels: needs CUDA\n")
    print_works((name, KERNELS[name]()) for name in names)


if __name__ == "__main__":
    main()
