"""Rotation and KV write in one pass: a program takes some heads of one token from the projection to their places."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_HEADS = 8


def rope_kv_kernel(
    qkv: Tensor, cos: Tensor, sin: Tensor, pool: Tensor, layer: int, slots: Tensor, is_interleaved: bool
) -> Tensor:
    """See `weft_kernels.rope_kv.rope_kv`."""
    num_tokens, num_all_heads, dim = qkv.shape
    kv_heads = pool.shape[1]
    num_heads = num_all_heads - 2 * kv_heads
    assert qkv.is_contiguous()
    assert dim % 2 == 0
    assert num_heads > 0
    assert pool.shape[3] == 2
    assert pool.shape[5] == dim
    assert pool.stride(5) == 1
    assert pool.dtype == qkv.dtype
    assert slots.shape == (num_tokens,)
    assert cos.shape == sin.shape
    assert cos.shape[1] >= dim // 2
    assert cos.stride() == sin.stride()
    assert cos.stride(1) == 1
    assert qkv.device == pool.device == slots.device == cos.device
    q = torch.empty(num_tokens, num_heads, dim, dtype=qkv.dtype, device=qkv.device)
    grid = (num_tokens, triton.cdiv(num_all_heads, BLOCK_HEADS))
    if num_tokens:
        _rope_kv[grid](
            qkv,
            cos,
            sin,
            pool[:, :, layer],
            slots,
            q,
            cos.stride(0),
            pool.stride(0),
            pool.stride(1),
            pool.stride(3),
            pool.stride(4),
            pool.shape[4],
            HEADS=num_heads,
            KV_HEADS=kv_heads,
            HALF=dim // 2,
            INTERLEAVED=is_interleaved,
            BLOCK_H=BLOCK_HEADS,
            BLOCK_I=triton.next_power_of_2(dim // 2),
        )
    return q


@triton.jit
def _rope_kv(
    p_qkv: tl.tensor,
    p_cos: tl.tensor,
    p_sin: tl.tensor,
    p_pool: tl.tensor,
    p_slots: tl.tensor,
    p_q: tl.tensor,
    stride_angle: tl.tensor,
    stride_block: tl.tensor,
    stride_head: tl.tensor,
    stride_kind: tl.tensor,
    stride_token: tl.tensor,
    block_tokens: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_I: tl.constexpr,
) -> None:
    i_token = tl.program_id(0).to(tl.int64)
    o_head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    o_pair = tl.arange(0, BLOCK_I)
    m_pair = o_pair < HALF
    # [BLOCK_I]
    b_cos = tl.load(p_cos + i_token * stride_angle + o_pair, mask=m_pair, other=0.0).to(tl.float32)
    b_sin = tl.load(p_sin + i_token * stride_angle + o_pair, mask=m_pair, other=0.0).to(tl.float32)
    if INTERLEAVED:
        o_first = 2 * o_pair
        o_second = 2 * o_pair + 1
    else:
        o_first = o_pair
        o_second = o_pair + HALF
    # [BLOCK_H, BLOCK_I]
    m_all = (o_head < HEADS + 2 * KV_HEADS)[:, None] & m_pair[None, :]
    p_row = p_qkv + (i_token * (HEADS + 2 * KV_HEADS) + o_head)[:, None] * (2 * HALF)
    b_first = tl.load(p_row + o_first[None, :], mask=m_all, other=0.0).to(tl.float32)
    b_second = tl.load(p_row + o_second[None, :], mask=m_all, other=0.0).to(tl.float32)
    is_value = (o_head >= HEADS + KV_HEADS)[:, None]
    b_left = tl.where(is_value, b_first, b_first * b_cos[None, :] - b_second * b_sin[None, :])
    b_right = tl.where(is_value, b_second, b_second * b_cos[None, :] + b_first * b_sin[None, :])
    b_left = b_left.to(p_q.dtype.element_ty)
    b_right = b_right.to(p_q.dtype.element_ty)
    m_query = m_all & (o_head < HEADS)[:, None]
    p_out = p_q + (i_token * HEADS + o_head)[:, None] * (2 * HALF)
    tl.store(p_out + o_first[None, :], b_left, mask=m_query)
    tl.store(p_out + o_second[None, :], b_right, mask=m_query)
    i_slot = tl.load(p_slots + i_token)
    o_kv = tl.maximum(o_head - HEADS, 0)
    p_token = p_pool + (i_slot // block_tokens) * stride_block + (i_slot % block_tokens) * stride_token
    p_kv = p_token + ((o_kv % KV_HEADS) * stride_head + (o_kv // KV_HEADS) * stride_kind)[:, None]
    m_kv = m_all & (o_head >= HEADS)[:, None]
    tl.store(p_kv + o_first[None, :], b_left, mask=m_kv)
    tl.store(p_kv + o_second[None, :], b_right, mask=m_kv)
