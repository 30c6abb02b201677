"""One program writes the cached vector of a token; others rotate its queries, some heads each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft_kernels.layer_cache import LayerCache

BLOCK_HEADS = 16


def latent_kv_kernel(
    down: Tensor,
    q: Tensor,
    norm: Tensor,
    eps: float,
    angles: tuple[Tensor, Tensor],
    cache: LayerCache,
    slots: Tensor,
) -> Tensor:
    num_tokens, num_heads, dim = q.shape
    (cos, sin), pool = angles, cache.keys
    _check(down, q, norm, cos, sin, pool, slots)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_tokens:
        _latent_kv[(num_tokens, 1 + triton.cdiv(num_heads, BLOCK_HEADS))](
            down,
            norm,
            q,
            cos,
            sin,
            pool,
            slots,
            out,
            eps,
            cos.stride(0),
            q.stride(0),
            q.stride(1),
            pool.stride(0),
            pool.stride(2),
            BLOCK_TOKENS=pool.shape[2],
            HEADS=num_heads,
            RANK=len(norm),
            HALF=dim // 2,
            BLOCK_H=BLOCK_HEADS,
            BLOCK_R=triton.next_power_of_2(len(norm)),
            BLOCK_I=triton.next_power_of_2(dim // 2),
            num_warps=2,
        )
    return out


def _check(down: Tensor, q: Tensor, norm: Tensor, cos: Tensor, sin: Tensor, pool: Tensor, slots: Tensor) -> None:
    num_tokens, _, dim = q.shape
    assert down.shape == (num_tokens, len(norm) + dim)
    assert down.is_contiguous()
    assert norm.is_contiguous()
    assert dim % 2 == 0
    assert q.stride(2) == 1
    assert pool.shape[1] == 1
    assert pool.shape[3] == len(norm) + dim
    assert down.dtype == q.dtype == norm.dtype == pool.dtype
    assert slots.shape == (num_tokens,)
    assert cos.shape == sin.shape == (num_tokens, dim)
    assert cos.dtype == sin.dtype
    assert cos.stride() == sin.stride()
    assert cos.stride(1) == 1
    assert down.device == q.device == norm.device == pool.device == slots.device == cos.device


# The slots of a layer group may start at any address.
@triton.jit(do_not_specialize_on_alignment=["p_slots"])
def _latent_kv(
    p_down: tl.tensor,
    p_norm: tl.tensor,
    p_q: tl.tensor,
    p_cos: tl.tensor,
    p_sin: tl.tensor,
    p_pool: tl.tensor,
    p_slots: tl.tensor,
    p_out: tl.tensor,
    eps: tl.tensor,
    stride_angle: tl.tensor,
    stride_row: tl.tensor,
    stride_head: tl.tensor,
    stride_block: tl.tensor,
    stride_token: tl.tensor,
    BLOCK_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_I: tl.constexpr,
) -> None:
    i_token = tl.program_id(0).to(tl.int64)
    i_part = tl.program_id(1)
    o_pair = tl.arange(0, BLOCK_I)
    m_pair = o_pair < HALF
    # [BLOCK_I]
    b_cos = tl.load(p_cos + i_token * stride_angle + o_pair, mask=m_pair, other=0.0).to(tl.float32)
    b_sin = tl.load(p_sin + i_token * stride_angle + o_pair, mask=m_pair, other=0.0).to(tl.float32)
    if i_part == 0:
        i_slot = tl.load(p_slots + i_token)
        p_row = p_down + i_token * (RANK + 2 * HALF)
        p_token = p_pool + (i_slot // BLOCK_TOKENS) * stride_block + (i_slot % BLOCK_TOKENS) * stride_token
        o_item = tl.arange(0, BLOCK_R)
        m_item = o_item < RANK
        # [BLOCK_R]
        b_x = tl.load(p_row + o_item, mask=m_item, other=0.0).to(tl.float32)
        b_weight = tl.load(p_norm + o_item, mask=m_item, other=0.0).to(tl.float32)
        b_scale = tl.rsqrt(tl.sum(b_x * b_x, 0) / RANK + eps)
        b_normed = (b_x * b_scale).to(p_out.dtype.element_ty).to(tl.float32)
        tl.store(p_token + o_item, (b_normed * b_weight).to(p_out.dtype.element_ty), mask=m_item)
        b_first = tl.load(p_row + RANK + o_pair, mask=m_pair, other=0.0).to(tl.float32)
        b_second = tl.load(p_row + RANK + HALF + o_pair, mask=m_pair, other=0.0).to(tl.float32)
        b_left = b_first * b_cos - b_second * b_sin
        b_right = b_second * b_cos + b_first * b_sin
        tl.store(p_token + RANK + o_pair, b_left.to(p_out.dtype.element_ty), mask=m_pair)
        tl.store(p_token + RANK + HALF + o_pair, b_right.to(p_out.dtype.element_ty), mask=m_pair)
    else:
        o_head = (i_part - 1) * BLOCK_H + tl.arange(0, BLOCK_H)
        # [BLOCK_H, BLOCK_I]
        m_all = (o_head < HEADS)[:, None] & m_pair[None, :]
        p_head = p_q + i_token * stride_row + o_head[:, None] * stride_head + o_pair[None, :]
        b_firsts = tl.load(p_head, mask=m_all, other=0.0).to(tl.float32)
        b_seconds = tl.load(p_head + HALF, mask=m_all, other=0.0).to(tl.float32)
        b_lefts = b_firsts * b_cos[None, :] - b_seconds * b_sin[None, :]
        b_rights = b_seconds * b_cos[None, :] + b_firsts * b_sin[None, :]
        p_turned = p_out + (i_token * HEADS + o_head)[:, None] * (2 * HALF) + o_pair[None, :]
        tl.store(p_turned, b_lefts.to(p_out.dtype.element_ty), mask=m_all)
        tl.store(p_turned + HALF, b_rights.to(p_out.dtype.element_ty), mask=m_all)
