"""Compile every kernel, as its launcher would call it, for an H100 and an H200; needs no GPU. Run as a program, with
numbers of left rows for the kernel that is for these alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import weft_kernels.block_copy.kernel as block_copy
import weft_kernels.latent_kv.kernel as latent_kv
import weft_kernels.moe.kernel as moe
import weft_kernels.moe_routing.kernel as moe_routing
import weft_kernels.packed.f12_unpack as f12_unpack
import weft_kernels.packed.gemv as gemv
import weft_kernels.packed.hopper as hopper
import weft_kernels.packed.hopper.kernel as hopper_kernel
import weft_kernels.packed.linear as packed
import weft_kernels.packed.scratch as scratch
import weft_kernels.paged_attention.decode as decode
import weft_kernels.paged_attention.prefill as prefill
import weft_kernels.rms_norm.kernel as rms_norm
import weft_kernels.rope_kv.kernel as rope_kv
import weft_kernels.sampling.kernel as sampling
import weft_kernels.sampling.top_k_p_search as top_k_p_search
import weft_kernels.silu_mul.kernel as silu_mul
from tests.kernels.compiling import Ignored, Recorder
from weft_kernels.layer_cache import uniform_pool
from weft_kernels.moe import ClampedSwiGlu
from weft_kernels.moe_routing import RoutingConfig
from weft_kernels.packed import F12, Fp8, Int4
from weft_kernels.paged_attention.device_batch import AttentionShape, plan_launches
from weft_kernels.rope_kv import ROTATED, HeadTransform
from weft_kernels.sampling.reference import SamplingRows

BF16 = torch.bfloat16
SLOTS = torch.tensor([3, 70])
Launches = dict[str, tuple[Any, str, Callable[[], Any]]]
"""By name: module, kernel name and a call of its launcher."""


def empty_f12(rows: int, columns: int) -> F12:
    """No weights at all: what a kernel is compiled for are types and sizes."""
    i32 = torch.int32
    words, blocks = torch.empty(3, rows, columns // 8, dtype=i32), -(-rows // 64)
    bases, starts = torch.empty(blocks, dtype=i32), torch.empty(rows // 4 + 2, dtype=i32)
    return F12(rows, columns, words, bases, starts, torch.empty(9, dtype=i32), torch.empty(9, dtype=BF16))


def empty_fp8(rows: int, columns: int) -> Fp8:
    words = torch.empty(rows, columns // 4, dtype=torch.int32)
    return Fp8(columns, words, torch.empty(rows // 128, columns // 128), (128, 128))


def empty_int4(rows: int, columns: int, has_zeros: bool = False) -> Int4:
    factors = torch.empty(rows, columns // 32, dtype=BF16)
    zeros = factors.byte() if has_zeros else None
    return Int4(columns, torch.empty(rows, columns // 8, dtype=torch.int32), factors, 32, zeros)


def slices_of(num_items: int) -> top_k_p_search.Slices:
    num_slices = -(-num_items // top_k_p_search.SLICE_ITEMS)
    limits = torch.ones(2, dtype=torch.int32)
    return top_k_p_search.Slices(torch.empty(2, num_items), torch.empty(2, num_slices), torch.ones(2), limits)


def hopper_launches(x: torch.Tensor, classes: list[int]) -> Launches:
    """The kernel that only a Hopper can run, in all its tiles for so many left rows. What is named last is how many
    programs share a multiprocessor."""
    setattr(hopper, "_num_multiprocessors", lambda device: 132)  # noqa: B010
    found: Launches = {}
    for num_rows in classes:
        rows, f12 = x[:1].repeat(num_rows, 1), empty_f12(6144, 4096)
        for index, tiles in enumerate(each for each in hopper.candidates(num_rows) if each["EVEN"]):
            name = f"F12 on Hopper, {num_rows} rows, {index}, programs {tiles['PER_MULTIPROCESSOR']}"
            found[name] = hopper_kernel, "f12_gemm", partial(hopper.gemm, rows, f12, None, tiles)
    return found


def row_launches() -> Launches:
    """Norms, rotations, cache writes and all else that takes rows as they come."""
    x, weight = torch.empty(2, 4096, dtype=BF16), torch.empty(4096, dtype=BF16)
    pool = torch.empty(4, 8, 2, 2, 64, 128, dtype=BF16)
    qkv, angles = torch.empty(2, 48, 128, dtype=BF16), torch.empty(2, 128, dtype=BF16)
    cache, wide = uniform_pool(pool).layers[0], angles.float()
    heads, wide_heads = (qkv, angles, angles, cache, SLOTS), (qkv, wide, wide, cache, SLOTS)
    normed, normed_last = HeadTransform((angles[0], angles[1]), eps=1e-6), HeadTransform(is_normed_last=True, eps=1e-5)
    unrotated = HeadTransform(is_rotated=False)
    turns, vectors = torch.empty(2, 64, dtype=BF16), torch.empty(4, 1, 2, 1, 64, 576, dtype=BF16)
    rotated = torch.empty(2, 64, 192, dtype=BF16)[..., 128:]
    latents = (
        torch.empty(2, 576, dtype=BF16),
        rotated,
        weight[:512],
        1e-6,
        (turns, turns),
        uniform_pool(vectors).layers[0],
        SLOTS,
    )
    return {
        "rms_norm": (rms_norm, "_rms_norm", lambda: rms_norm.rms_norm_kernel(x, weight, 1e-5)),
        "add_rms_norm": (rms_norm, "_rms_norm", lambda: rms_norm.add_rms_norm_kernel(x, x, weight, 1e-5)),
        "silu_mul": (silu_mul, "_silu_mul", lambda: silu_mul.silu_mul_kernel(x)),
        "gather": (block_copy, "_copy", lambda: block_copy.gather_blocks_kernel(pool, SLOTS)),
        "rope": (rope_kv, "_rope_kv", lambda: rope_kv.rope_kv_kernel(*heads, ROTATED, None)),
        "rope, normed": (rope_kv, "_rope_kv", lambda: rope_kv.rope_kv_kernel(*heads, normed, None)),
        "rope, normed last": (rope_kv, "_rope_kv", lambda: rope_kv.rope_kv_kernel(*wide_heads, normed_last, None)),
        "no rope": (rope_kv, "_rope_kv", lambda: rope_kv.rope_kv_kernel(*heads, unrotated, torch.ones(2, 1, 1))),
        "latent": (latent_kv, "_latent_kv", lambda: latent_kv.latent_kv_kernel(*latents)),
    }


def sampling_launches() -> Launches:
    """Of both searches, over few slices and many."""
    f32, f64, i64 = torch.float32, torch.float64, torch.int64
    names = {"temperature": f32, "top_k": i64, "top_p": f64, "min_p": f32, "seeds": i64, "positions": i64}
    columns = {name: torch.ones(2, dtype=dtype) for name, dtype in names.items()}
    rows = SamplingRows(**columns, has_top_k=False, has_top_p=False)
    logits, token_ids = torch.empty(2, 128_256), torch.ones(128_256, dtype=torch.int32)
    slices = slices_of(128_256)
    return {
        "sampling": (sampling, "race_in_slices", lambda: sampling.sample_kernel(logits, rows)),
        "sampling, drafts": (sampling, "race_in_slices", lambda: sampling.sample_kernel(logits, rows, token_ids)),
        "sampling, winners": (sampling, "pick_winners", lambda: sampling.sample_kernel(logits, rows)),
        "sampling, best": (sampling, "_tops", lambda: sampling.sample_kernel(logits, rows)),
        "sampling, sums": (sampling, "_sums", lambda: sampling._sums_of(slices)),
        "sampling, one slice": (
            top_k_p_search,
            "_digit",
            lambda: top_k_p_search.cut(slices_of(2000), rows.top_k, None),
        ),
        "sampling, 38 slices": (
            top_k_p_search,
            "_digit",
            lambda: top_k_p_search.cut(slices_of(151_936), rows.top_k, None),
        ),
        "sampling, 65 slices": (
            top_k_p_search,
            "_digit",
            lambda: top_k_p_search.cut(slices_of(262_208), rows.top_k, None),
        ),
        "sampling, top-k": (top_k_p_search, "_digit", lambda: top_k_p_search.cut(slices, rows.top_k, None)),
        "sampling, top-p": (
            top_k_p_search,
            "_digit",
            lambda: top_k_p_search.cut(slices, rows.top_p, torch.empty(2, 32, dtype=f64)),
        ),
    }


def expert_launches() -> Launches:
    """Routing, and experts of every form."""
    i64 = torch.int64
    scored, bias, grouped = torch.empty(2, 256), torch.empty(256), RoutingConfig(8, False, True, 8, 4, 2.5)
    rows_in, gates, downs = (torch.empty(shape, dtype=BF16) for shape in ((2, 2048), (8, 1536, 2048), (8, 2048, 768)))
    few_rows = rows_in, torch.zeros(2, 4, dtype=i64), torch.ones(2, 4), gates, downs, False
    biases = torch.empty(8, 1536, dtype=BF16), torch.empty(8, 2048, dtype=BF16)
    many_rows = rows_in.repeat(128, 1), torch.zeros(256, 4, dtype=i64), torch.ones(256, 4), gates, downs, True
    int4_rows = *few_rows[:3], empty_int4(8 * 1536, 2048), empty_int4(8 * 2048, 768), False
    int4_many = *many_rows[:3], *int4_rows[3:]
    int4_zeros = *many_rows[:3], empty_int4(8 * 1536, 2048, True), empty_int4(8 * 2048, 768, True), False
    one_chosen = rows_in, torch.zeros(2, 1, dtype=i64), torch.ones(2, 1)
    one_expert = *one_chosen, empty_f12(1536, 2048), empty_f12(2048, 768), False
    fp8_rows = *few_rows[:3], empty_fp8(8 * 1536, 2048), empty_fp8(8 * 2048, 768), False
    f12_rows = *few_rows[:3], empty_f12(8 * 1536, 2048), empty_f12(8 * 2048, 768), False
    return {
        "routing": (moe_routing, "_route", lambda: moe_routing.route_kernel(scored, None, RoutingConfig(8, True))),
        "routing, groups": (moe_routing, "_route", lambda: moe_routing.route_kernel(scored, bias, grouped)),
        "experts": (moe, "_gate_up", lambda: moe.moe_kernel(*few_rows)),
        "experts, biased": (moe, "_gate_up", lambda: moe.moe_kernel(*few_rows, biases, ClampedSwiGlu(1.7, 7.0))),
        "experts down, biased": (moe, "_down", lambda: moe.moe_kernel(*few_rows, biases)),
        "experts, prompt": (moe, "_gate_up", lambda: moe.moe_kernel(*many_rows)),
        "experts down": (moe, "_down", lambda: moe.moe_kernel(*few_rows)),
        "experts down, prompt": (moe, "_down", lambda: moe.moe_kernel(*many_rows)),
        "experts, F12": (moe, "_gate_up", lambda: moe.moe_kernel(*f12_rows)),
        "experts, INT4": (moe, "_gate_up", lambda: moe.moe_kernel(*int4_rows)),
        "experts, INT4, prompt": (moe, "_gate_up", lambda: moe.moe_kernel(*int4_many)),
        "experts, INT4 with zeros": (moe, "_gate_up", lambda: moe.moe_kernel(*int4_zeros)),
        "experts down, FP8": (moe, "_down", lambda: moe.moe_kernel(*fp8_rows)),
        "expert, F12": (moe, "_down", lambda: moe.moe_kernel(*one_expert)),
    }


def packed_launches() -> Launches:
    """Products with packed weights, and these unpacked."""
    x = torch.empty(2, 4096, dtype=BF16)
    f12, fp8, int4 = empty_f12(6144, 4096), empty_fp8(6144, 4096), empty_int4(6144, 4096)
    return {
        "FP8, a prompt": (packed, "_gemm", lambda: packed.linear_packed(x.repeat(2048, 1), fp8)),
        "INT4, few rows": (packed, "_gemm", lambda: packed.linear_packed(x, int4)),
        "INT4 with zeros": (packed, "_gemm", lambda: packed.linear_packed(x, empty_int4(6144, 4096, True))),
        "FP8, one row": (packed, "_gemm", lambda: packed.linear_packed(x[:1], fp8)),
        "F12, one row": (gemv, "_gemv", lambda: packed.linear_packed(x[:1], empty_f12(1, 4096))),
        "F12, few rows": (packed, "_gemm", lambda: packed.linear_packed(x, f12)),
        "F12, rows transposed": (scratch, "_transpose", lambda: packed.gemm(x.repeat(32, 1), f12)),
        "F12, a batch": (packed, "_gemm", lambda: packed.gemm(x.repeat(32, 1), f12)),
        "F12, a prompt": (packed, "_gemm", lambda: packed.gemm(x.repeat(256, 1), f12)),
        "F12, unpacked": (f12_unpack, "_unpack", lambda: f12_unpack.unpack_rows(empty_f12(1, 4096))),
        "F12, looked up": (f12_unpack, "_unpack", lambda: f12_unpack.unpack_rows(f12, SLOTS)),
    }


def decode_launches() -> Launches:
    """Of heads and of latents, whose parts are joined."""
    q, pool = torch.empty(2, 32, 128, dtype=BF16), torch.empty(4, 8, 2, 2, 64, 128, dtype=BF16)
    keys, values, sinks = pool[:, :, 0, 0], pool[:, :, 0, 1], torch.empty(32)
    lists = [0, 1, 2], [70, 3], [[1, 2], [0]]
    batch, bounded = (plan_launches(*lists, torch.device("cpu"), first).decode for first in (None, [9, 0]))
    assert batch is not None
    assert bounded is not None
    shape, windowed = AttentionShape(0.1, num_splits=8), AttentionShape(0.1, window=4096, num_splits=8)
    split = AttentionShape(0.1, num_splits=32)
    latent = torch.empty(4, 1, 2, 1, 64, 576, dtype=BF16)[:, :, 0, 0]
    latent_q, latent_out = torch.empty(2, 64, 576, dtype=BF16), torch.empty(2, 64, 512, dtype=BF16)
    return {
        "decode": (decode, "_decode", lambda: decode.paged_attention_decode(q, keys, values, batch, shape, q)),
        "decode, first": (
            decode,
            "_decode",
            lambda: decode.paged_attention_decode(q, keys, values, bounded, shape, q),
        ),
        "join": (decode, "_join", lambda: decode.paged_attention_decode(q, keys, values, batch, shape, q)),
        "decode, sinks": (
            decode,
            "_decode",
            lambda: decode.paged_attention_decode(q, keys, values, batch, AttentionShape(0.1, num_splits=1), q, sinks),
        ),
        "join, sinks": (
            decode,
            "_join",
            lambda: decode.paged_attention_decode(q, keys, values, batch, shape, q, sinks),
        ),
        "join, latent": (
            decode,
            "_join",
            lambda: decode.paged_attention_decode(latent_q, latent, latent[..., :512], batch, split, latent_out),
        ),
        "decode, window": (
            decode,
            "_decode",
            lambda: decode.paged_attention_decode(q, keys, values, batch, windowed, q),
        ),
        "decode, latent": (
            decode,
            "_decode",
            lambda: decode.paged_attention_decode(latent_q, latent, latent[..., :512], batch, shape, latent_out),
        ),
    }


def prefill_launches() -> Launches:
    """Of heads, of latents, and of heads that are made of latents."""
    q, pool = torch.empty(64, 32, 128, dtype=BF16), torch.empty(4, 8, 2, 2, 64, 128, dtype=BF16)
    keys, values, sinks = pool[:, :, 0, 0], pool[:, :, 0, 1], torch.empty(32)
    long = plan_launches([0, 64], [70], [[1, 2]], torch.device("cpu")).prefill
    assert long is not None
    few, bounded = long.slice(0, 1, 2), replace(long, first=torch.ones(1, dtype=torch.int32))
    shape, windowed = AttentionShape(0.1, num_splits=8), AttentionShape(0.1, window=4096, num_splits=8)
    latent = torch.empty(4, 1, 2, 1, 64, 576, dtype=BF16)[:, :, 0, 0]
    latent_q, latent_out = torch.empty(2, 64, 576, dtype=BF16), torch.empty(2, 64, 512, dtype=BF16)
    made = torch.empty(4, 8, 1, 2, 64, 192, dtype=BF16)[:, :, 0]  # MLA's keys of 128 + 64 and values, for a long chunk
    made_q, made_out = torch.empty(2, 64, 8, 192, dtype=BF16)
    return {
        "prefill": (
            prefill,
            "_prefill",
            lambda: prefill.paged_attention_prefill(q, keys, values, long, shape, q),
        ),
        "prefill, first": (
            prefill,
            "_prefill",
            lambda: prefill.paged_attention_prefill(q, keys, values, bounded, windowed, q),
        ),
        "prefill, sinks": (
            prefill,
            "_prefill",
            lambda: prefill.paged_attention_prefill(q, keys, values, long, windowed, q, sinks),
        ),
        "prefill, window": (
            prefill,
            "_prefill",
            lambda: prefill.paged_attention_prefill(q, keys, values, long, windowed, q),
        ),
        "prefill, made keys": (
            prefill,
            "_prefill",
            lambda: prefill.paged_attention_prefill(made_q, made[:, :, 0], made[:, :, 1], long, shape, made_out),
        ),
        "prefill, latent": (
            prefill,
            "_prefill",
            lambda: prefill.paged_attention_prefill(latent_q, latent, latent[..., :512], few, shape, latent_out),
        ),
    }


def launches() -> Launches:
    """On shapes of an 8B model."""
    return {
        **row_launches(),
        **sampling_launches(),
        **expert_launches(),
        **packed_launches(),
        **decode_launches(),
        **prefill_launches(),
    }


def compile_all(classes: list[int]) -> dict[str, dict[str, int]]:
    """Figures by launch, of the kernel for Hopper alone, for so many left rows, or of all others."""
    usual = launches()
    found, all_launches = {}, hopper_launches(torch.empty(2, 4096, dtype=BF16), classes) if classes else usual
    for module in {module for module, _, _ in usual.values() if hasattr(module, "pdl_launch_args")}:
        module.pdl_launch_args = lambda x: {"USES_PDL": True}  # as a Hopper does; the tensors are a CPU's
    kernels = {(each[0], each[1]): getattr(each[0], each[1]) for each in (*usual.values(), *all_launches.values())}
    for module, name in kernels:
        setattr(module, name, Ignored())
    for name, (module, wanted, launch) in all_launches.items():
        recorder = Recorder(kernels[module, wanted])
        setattr(module, wanted, recorder)
        launch()
        setattr(module, wanted, Ignored())
        found[name] = recorder.figures
    return found


if __name__ == "__main__":
    print(json.dumps(compile_all([int(each) for each in sys.argv[1:]]), indent=1))
