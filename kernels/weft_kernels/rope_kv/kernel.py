"""Norms, rotation and KV write in one pass; a program processes some heads of one token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from weft_kernels.launch import pdl_launch_args
from weft_kernels.layer_cache import LayerCache
from weft_kernels.rope_kv import HeadTransform

BLOCK_HEADS = 8


def rope_kv_kernel(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: LayerCache,
    slots: Tensor,
    rule: HeadTransform,
    temperature: Tensor | None,
) -> Tensor:
    num_tokens, num_all_heads, dim = qkv.shape
    keys, kv_heads = cache.keys, cache.keys.shape[1]
    num_heads = num_all_heads - 2 * kv_heads
    _check(qkv, cos, sin, cache, slots, rule, temperature)
    q = torch.empty(num_tokens, num_heads, dim, dtype=qkv.dtype, device=qkv.device)
    q_norm, k_norm = rule.norms or (qkv, qkv)
    if num_tokens:
        _rope_kv[(num_tokens, triton.cdiv(num_all_heads, BLOCK_HEADS))](
            qkv,
            cos,
            sin,
            q_norm,
            k_norm,
            qkv if temperature is None else temperature,
            keys,
            slots,
            q,
            rule.eps,
            cos.stride(0),
            *keys.stride()[:2],
            cache.values.storage_offset() - keys.storage_offset(),
            keys.stride(2),
            BLOCK_TOKENS=keys.shape[2],
            HEADS=num_heads,
            KV_HEADS=kv_heads,
            HALF=dim // 2,
            HAS_NORMS=rule.norms is not None,
            ROTATED=rule.is_rotated,
            NORMED_LAST=rule.is_normed_last,
            HAS_TEMPERATURE=temperature is not None,
            BLOCK_H=BLOCK_HEADS,
            BLOCK_I=triton.next_power_of_2(dim // 2),
            num_warps=2,
            **pdl_launch_args(qkv),
        )
    return q


def _check(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: LayerCache,
    slots: Tensor,
    rule: HeadTransform,
    temperature: Tensor | None,
) -> None:
    num_tokens, num_all_heads, dim = qkv.shape
    keys, values = cache.keys, cache.values
    assert qkv.is_contiguous()
    assert dim % 2 == 0
    assert num_all_heads > 2 * keys.shape[1]
    assert keys.shape[3] == values.shape[3] == dim
    assert keys.stride() == values.stride()
    assert keys.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
    assert keys.dtype == qkv.dtype
    assert slots.shape == (num_tokens,)
    assert cos.shape == sin.shape
    assert cos.dtype == sin.dtype
    assert cos.shape[1] >= dim // 2
    assert cos.stride() == sin.stride()
    assert cos.stride(1) == 1
    assert qkv.device == keys.device == slots.device == cos.device
    for weight in rule.norms or ():
        assert weight.shape == (dim,)
        assert weight.is_contiguous()
        assert weight.dtype == qkv.dtype
    if temperature is not None:
        assert temperature.shape == (num_tokens, 1, 1)
        assert temperature.is_contiguous()
        assert temperature.dtype == torch.float32
        assert temperature.device == qkv.device


@triton.jit
def _normed(
    b_first: tl.tensor, b_second: tl.tensor, eps: tl.tensor, HALF: tl.constexpr, ITEM: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Divide heads [BLOCK_H, BLOCK_I], in two halves, by their root mean square, and round."""
    b_scale = tl.rsqrt(tl.sum(b_first * b_first + b_second * b_second, 1) / (2 * HALF) + eps)[:, None]
    return (b_first * b_scale).to(ITEM).to(tl.float32), (b_second * b_scale).to(ITEM).to(tl.float32)


@triton.jit
def _weighed(
    b_left: tl.tensor,
    b_right: tl.tensor,
    p_q_norm: tl.tensor,
    p_k_norm: tl.tensor,
    is_query: tl.tensor,
    HALF: tl.constexpr,
    ITEM: tl.constexpr,
    BLOCK_I: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Multiply heads by the norm weights of queries or keys, and round."""
    o_pair = tl.arange(0, BLOCK_I)
    m_pair = o_pair < HALF
    b_q_left = tl.load(p_q_norm + o_pair, mask=m_pair, other=0.0).to(tl.float32)[None, :]
    b_k_left = tl.load(p_k_norm + o_pair, mask=m_pair, other=0.0).to(tl.float32)[None, :]
    b_q_right = tl.load(p_q_norm + HALF + o_pair, mask=m_pair, other=0.0).to(tl.float32)[None, :]
    b_k_right = tl.load(p_k_norm + HALF + o_pair, mask=m_pair, other=0.0).to(tl.float32)[None, :]
    b_left = (b_left * tl.where(is_query, b_q_left, b_k_left)).to(ITEM).to(tl.float32)
    b_right = (b_right * tl.where(is_query, b_q_right, b_k_right)).to(ITEM).to(tl.float32)
    return b_left, b_right


@triton.jit
def _turned(
    b_left: tl.tensor, b_right: tl.tensor, b_cos: tl.tensor, b_sin: tl.tensor, ITEM: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Rotate heads by the angles of their token, and round."""
    b_turned = (b_left * b_cos - b_right * b_sin).to(ITEM).to(tl.float32)
    return b_turned, (b_right * b_cos + b_left * b_sin).to(ITEM).to(tl.float32)


# The slots of a layer group may start at any address.
@triton.jit(do_not_specialize_on_alignment=["p_slots"])
def _rope_kv(
    p_qkv: tl.tensor,
    p_cos: tl.tensor,
    p_sin: tl.tensor,
    p_q_norm: tl.tensor,
    p_k_norm: tl.tensor,
    p_temperature: tl.tensor,
    p_pool: tl.tensor,
    p_slots: tl.tensor,
    p_q: tl.tensor,
    eps: tl.tensor,
    stride_angle: tl.tensor,
    stride_block: tl.tensor,
    stride_head: tl.tensor,
    stride_kind: tl.tensor,
    stride_token: tl.tensor,
    BLOCK_TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    ROTATED: tl.constexpr,
    NORMED_LAST: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    USES_PDL: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_I: tl.constexpr,
) -> None:
    if USES_PDL:
        gdc_launch_dependents()
        gdc_wait()
    ITEM: tl.constexpr = p_q.dtype.element_ty
    i_token = tl.program_id(0).to(tl.int64)
    o_head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    o_pair = tl.arange(0, BLOCK_I)
    m_pair = o_pair < HALF
    is_query = (o_head < HEADS)[:, None]
    is_value = (o_head >= HEADS + KV_HEADS)[:, None]
    # [BLOCK_H, BLOCK_I]
    m_all = (o_head < HEADS + 2 * KV_HEADS)[:, None] & m_pair[None, :]
    p_row = p_qkv + (i_token * (HEADS + 2 * KV_HEADS) + o_head)[:, None] * (2 * HALF) + o_pair[None, :]
    b_first = tl.load(p_row, mask=m_all, other=0.0).to(tl.float32)
    b_second = tl.load(p_row + HALF, mask=m_all, other=0.0).to(tl.float32)
    # Load the slot early: loads are not moved before earlier stores.
    i_slot = tl.load(p_slots + i_token)
    if ROTATED:
        b_cos = tl.load(p_cos + i_token * stride_angle + o_pair, mask=m_pair, other=0.0).to(tl.float32)[None, :]
        b_sin = tl.load(p_sin + i_token * stride_angle + o_pair, mask=m_pair, other=0.0).to(tl.float32)[None, :]
    b_left, b_right = b_first, b_second
    if HAS_NORMS:
        b_left, b_right = _normed(b_left, b_right, eps, HALF, ITEM)
        b_left, b_right = _weighed(b_left, b_right, p_q_norm, p_k_norm, is_query, HALF, ITEM, BLOCK_I)
    if ROTATED:
        b_left, b_right = _turned(b_left, b_right, b_cos, b_sin, ITEM)
    if NORMED_LAST:
        b_left, b_right = _normed(b_left, b_right, eps, HALF, ITEM)
    if HAS_TEMPERATURE:
        b_factor = tl.where(is_query, tl.load(p_temperature + i_token), 1.0)
        b_left = b_left * b_factor
        b_right = b_right * b_factor
    b_left = tl.where(is_value, b_first, b_left).to(ITEM)
    b_right = tl.where(is_value, b_second, b_right).to(ITEM)
    m_query = m_all & is_query
    p_out = p_q + (i_token * HEADS + o_head)[:, None] * (2 * HALF) + o_pair[None, :]
    tl.store(p_out, b_left, mask=m_query)
    tl.store(p_out + HALF, b_right, mask=m_query)
    o_kv = tl.maximum(o_head - HEADS, 0)
    p_token = p_pool + (i_slot // BLOCK_TOKENS) * stride_block + (i_slot % BLOCK_TOKENS) * stride_token
    p_kv = p_token + ((o_kv % KV_HEADS) * stride_head + (o_kv // KV_HEADS) * stride_kind)[:, None] + o_pair[None, :]
    m_kv = m_all & (o_head >= HEADS)[:, None]
    tl.store(p_kv, b_left, mask=m_kv)
    tl.store(p_kv + HALF, b_right, mask=m_kv)
