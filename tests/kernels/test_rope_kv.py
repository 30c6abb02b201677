"""Queries, keys and latent vectors on their way to attention, by kernels and by one op after another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.device import DEVICE, close

pytest.importorskip("triton")

from weft_kernels.latent_kv import latent_kv, latent_kv_reference
from weft_kernels.latent_kv.kernel import latent_kv_kernel
from weft_kernels.layer_cache import uniform_pool
from weft_kernels.rope import rope
from weft_kernels.rope_kv import ROTATED, HeadTransform, rope_kv, rope_kv_reference
from weft_kernels.rope_kv.kernel import rope_kv_kernel

# No tl.dot here: values are fp32 between load and store, so that bfloat16 is right but for the last rounding.
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NUM_TOKENS = 5
SLOTS = torch.tensor([23, 0, 5, 6, 9])


def angles(dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    turns = torch.randn(NUM_TOKENS, dim // 2).repeat(1, 2)
    return turns.cos().to(dtype), turns.sin().to(dtype)


def rules(dim: int, dtype: torch.dtype) -> dict[str, HeadTransform]:
    q_norm, k_norm = torch.randn(2, dim).to(dtype)
    return {
        "rotated": ROTATED,
        "as they are": HeadTransform(is_rotated=False),
        "Qwen3": HeadTransform((q_norm, k_norm), eps=1e-6),
        "normed, not rotated": HeadTransform((q_norm, k_norm), is_rotated=False, eps=1e-6),
        "Llama 4": HeadTransform(is_normed_last=True, eps=1e-5),
    }


def on_device(rule: HeadTransform) -> HeadTransform:
    norms = None if rule.norms is None else (rule.norms[0].to(DEVICE), rule.norms[1].to(DEVICE))
    return HeadTransform(norms, rule.is_rotated, rule.is_normed_last, rule.eps)


@pytest.mark.parametrize("name", rules(2, torch.float32))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim"), [((4, 2), 16), ((3, 1), 10), ((10, 10), 6)])
def test_rope_kv(heads: tuple[int, int], dim: int, dtype: torch.dtype, name: str) -> None:
    num_heads, kv_heads = heads
    qkv = torch.randn(NUM_TOKENS, num_heads + 2 * kv_heads, dim).to(dtype)
    rule = rules(dim, dtype)[name]
    cos, sin = angles(dim, torch.float32 if rule.is_normed_last else dtype)
    pool = torch.randn(6, kv_heads, 3, 2, 4, dim).to(dtype)
    written = pool.to(DEVICE).clone()
    temperature = None if rule.is_rotated else torch.rand(NUM_TOKENS, 1, 1) + 1
    q = rope_kv_kernel(
        qkv.to(DEVICE), cos.to(DEVICE), sin.to(DEVICE), uniform_pool(written).layers[1], SLOTS.to(DEVICE),
        on_device(rule), None if temperature is None else temperature.to(DEVICE),
    )  # fmt: skip
    expected = rope_kv(qkv.clone(), cos, sin, uniform_pool(pool).layers[1], SLOTS, rule, temperature)
    # what is rounded between two steps may be a step of its type away behind each, of terms larger than their sum
    factor = 1.0 if rule == ROTATED else 4.0
    close(q.cpu(), expected, factor)
    close(written.cpu(), pool, factor)
    assert torch.equal(written[:, :, [0, 2]].cpu(), pool[:, :, [0, 2]])


@pytest.mark.parametrize("name", rules(2, torch.float32))
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_after_another_they_do_what_the_references_say(name: str, dtype: torch.dtype) -> None:
    dim, rank = 16, 24
    qkv, (cos, sin) = torch.randn(NUM_TOKENS, 8, dim).to(dtype), angles(dim, dtype)
    wide = cos.float(), sin.float()
    temperature = torch.rand(NUM_TOKENS, 1, 1) + 1
    pools = torch.zeros(2, 6, 2, 3, 2, 4, dim).to(dtype)
    rule = rules(dim, dtype)[name]
    expected = rope_kv_reference(qkv, cos, sin, uniform_pool(pools[0]).layers[1], SLOTS, rule, temperature)
    close(rope_kv(qkv.clone(), cos, sin, uniform_pool(pools[1]).layers[1], SLOTS, rule, temperature), expected, 4.0)
    close(pools[1], pools[0], 4.0)
    expected = rope_kv_reference(qkv, *wide, uniform_pool(pools[0]).layers[1], SLOTS, rule, temperature)
    close(rope_kv(qkv.clone(), *wide, uniform_pool(pools[1]).layers[1], SLOTS, rule, temperature), expected, 4.0)
    assert expected.dtype == dtype
    down, norm = torch.randn(NUM_TOKENS, rank + dim).to(dtype), torch.randn(rank).to(dtype)
    latents = torch.zeros(2, 6, 1, 3, 1, 4, rank + dim).to(dtype)
    expected = latent_kv_reference(down, qkv, norm, 1e-6, (cos, sin), uniform_pool(latents[0]).layers[1], SLOTS)
    close(latent_kv(down, qkv, norm, 1e-6, (cos, sin), uniform_pool(latents[1]).layers[1], SLOTS), expected)
    close(latents[1], latents[0])


def test_the_reference_rotates_as_rope_does() -> None:
    qkv, turns = torch.randn(4, 6, 8), torch.randn(4, 4).repeat(1, 2)
    cos, sin = turns.cos(), turns.sin()
    pool = torch.zeros(1, 1, 1, 2, 4, 8)
    q = rope_kv_reference(qkv, cos, sin, uniform_pool(pool).layers[0], torch.arange(4), ROTATED)
    assert torch.equal(q, rope(qkv, cos, sin)[:, :4])
    assert torch.equal(pool[0, 0, 0, 0], rope(qkv, cos, sin)[:, 4])
    assert torch.equal(pool[0, 0, 0, 1], qkv[:, 5])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "nope", "rank", "dim"), [(4, 8, 32, 16), (17, 6, 20, 10), (1, 2, 3, 2)])
def test_latent_kv(num_heads: int, nope: int, rank: int, dim: int, dtype: torch.dtype) -> None:
    down, norm = torch.randn(NUM_TOKENS, rank + dim).to(dtype), torch.randn(rank).to(dtype)
    heads = torch.randn(NUM_TOKENS, num_heads, nope + dim).to(dtype)
    cos, sin = angles(dim, dtype)
    pool = torch.randn(6, 1, 3, 1, 4, rank + dim).to(dtype)
    written, there = pool.to(DEVICE).clone(), (cos.to(DEVICE), sin.to(DEVICE))
    q = latent_kv_kernel(
        down.to(DEVICE),
        heads.to(DEVICE)[..., nope:],
        norm.to(DEVICE),
        1e-6,
        there,
        uniform_pool(written).layers[1],
        SLOTS.to(DEVICE),
    )
    expected = latent_kv(down, heads[..., nope:], norm, 1e-6, (cos, sin), uniform_pool(pool).layers[1], SLOTS)
    close(q.cpu(), expected)
    close(written.cpu(), pool)
    assert torch.equal(written[:, :, [0, 2]].cpu(), pool[:, :, [0, 2]])


def test_no_rows_are_no_launch() -> None:
    none, slots = torch.empty(0, 4, 8, device=DEVICE), torch.empty(0, dtype=torch.int64, device=DEVICE)
    turns = torch.empty(0, 8, device=DEVICE)
    pool = torch.zeros(1, 1, 1, 2, 4, 8, device=DEVICE)
    assert rope_kv_kernel(none, turns, turns, uniform_pool(pool).layers[0], slots, ROTATED, None).shape == (0, 2, 8)
    latent = torch.zeros(1, 1, 1, 1, 4, 12, device=DEVICE)
    down, norm = torch.empty(0, 12, device=DEVICE), torch.ones(4, device=DEVICE)
    assert latent_kv_kernel(down, none, norm, 1e-6, (turns, turns), uniform_pool(latent).layers[0], slots).shape == (
        0,
        4,
        8,
    )
    assert not pool.any()
    assert not latent.any()
