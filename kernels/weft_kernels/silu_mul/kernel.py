"""SiLU and product in one pass: each projection is read once, the result written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from weft_kernels.launch import pdl_launch_args

BLOCK_ITEMS = 1024


def silu_mul_kernel(gate_up: Tensor) -> Tensor:
    assert gate_up.is_contiguous()
    assert gate_up.shape[-1] % 2 == 0
    num_items = gate_up.shape[-1] // 2
    rows = gate_up.view(-1, 2 * num_items)
    out = torch.empty(*gate_up.shape[:-1], num_items, dtype=gate_up.dtype, device=gate_up.device)
    grid = (len(rows), triton.cdiv(num_items, BLOCK_ITEMS))
    if len(rows):
        _silu_mul[grid](rows, out, num_items, BLOCK=BLOCK_ITEMS, **pdl_launch_args(rows))
    return out


@triton.jit
def _silu_mul(
    p_gate_up: tl.tensor, p_out: tl.tensor, num_items: tl.tensor, USES_PDL: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    if USES_PDL:
        gdc_launch_dependents()
        gdc_wait()
    i_row = tl.program_id(0).to(tl.int64)
    o_item = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_item = o_item < num_items
    p_gate = p_gate_up + i_row * 2 * num_items + o_item
    # [BLOCK] each
    b_gate = tl.load(p_gate, mask=m_item, other=0.0).to(tl.float32)
    b_up = tl.load(p_gate + num_items, mask=m_item, other=0.0).to(tl.float32)
    b_silu = (b_gate * tl.sigmoid(b_gate)).to(p_out.dtype.element_ty).to(tl.float32)
    tl.store(p_out + i_row * num_items + o_item, (b_silu * b_up).to(p_out.dtype.element_ty), mask=m_item)
