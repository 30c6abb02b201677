"""F12 to bfloat16 on a GPU: whole weights for long prompts, or the table rows of some tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from weft_kernels.launch import cdiv, next_power_of_2, pdl_launch_args
from weft_kernels.packed.f12 import F12
from weft_kernels.packed.f12_tiles import f12_column, f12_pair, f12_place, f12_row

BLOCK_WORDS = 1024
# of a thread: what it loads and stores at a time is 16 bytes
THREAD_WORDS = 4


def unpack_rows(weight: F12, ids: Tensor | None = None) -> Tensor:
    """[rows, columns] bfloat16, every bit as it was; with `ids` [T] int64, only these rows, in this order."""
    num_rows = weight.rows if ids is None else len(ids)
    bits = torch.empty(num_rows, weight.columns, dtype=torch.int16, device=weight.device)
    if not bits.numel():
        return bits.view(torch.bfloat16)
    words = weight.words.shape[2]
    block_j = min(BLOCK_WORDS, max(32, next_power_of_2(words)))
    escapes = weight.starts, weight.places, weight.values.view(torch.int16)
    out = bits.view(torch.int32) if weight.columns % 8 == 0 else bits
    _unpack[num_rows, cdiv(words, block_j)](
        *(weight.starts if ids is None else ids, weight.words, weight.bases, *escapes, out, weight.rows),
        HAS_IDS=ids is not None,
        SIZE=weight.columns,
        BLOCK_J=block_j,
        num_warps=max(1, block_j // THREAD_WORDS // 32),
        **pdl_launch_args(bits),
    )
    return bits.view(torch.bfloat16)


@triton.jit
def _unpack(
    p_ids: tl.tensor,
    p_words: tl.tensor,
    p_bases: tl.tensor,
    p_starts: tl.tensor,
    p_places: tl.tensor,
    p_values: tl.tensor,
    p_out: tl.tensor,
    num_rows: tl.tensor,
    HAS_IDS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_J: tl.constexpr,
    USES_PDL: tl.constexpr,
) -> None:
    """A run of words of one row, and its escapes. p_out: of pairs, as int32, or of int16 one by one."""
    WORDS: tl.constexpr = (SIZE + 7) // 8
    if USES_PDL:
        gdc_launch_dependents()
        if HAS_IDS:
            gdc_wait()
    i_out = tl.program_id(0).to(tl.int64)
    row = tl.load(p_ids + i_out) if HAS_IDS else i_out
    block = row // 64
    o_j = tl.program_id(1) * BLOCK_J + tl.arange(0, BLOCK_J)
    m_j = o_j < WORDS
    plane = tl.cast(num_rows, tl.int64) * WORDS
    p_row = p_words + row * WORDS + o_j
    b_0 = tl.load(p_row, mask=m_j, other=0)
    b_1 = tl.load(p_row + plane, mask=m_j, other=0)
    b_2 = tl.load(p_row + 2 * plane, mask=m_j, other=0)
    base = tl.load(p_bases + block) << 7
    if USES_PDL and not HAS_IDS:
        gdc_wait()
    PAIRED: tl.constexpr = p_out.dtype.element_ty == tl.int32
    p_to = p_out + i_out * (SIZE // 2 if PAIRED else SIZE)
    for FOURTH in tl.static_range(4):
        b_pair = f12_pair(b_0, b_1, b_2, 2 * FOURTH)
        b_pair += tl.where(b_pair & 0x0780 != 0, base, 0) + tl.where(b_pair & 0x07800000 != 0, base << 16, 0)
        o_pair = f12_place(o_j, FOURTH, SIZE)
        if PAIRED:
            tl.store(p_to + o_pair, b_pair, mask=m_j)
        else:
            o_k = 2 * o_pair
            tl.store(p_to + o_k, b_pair.to(tl.int16), mask=m_j & (o_k < SIZE))
            tl.store(p_to + o_k + 1, (b_pair >> 16).to(tl.int16), mask=m_j & (o_k + 1 < SIZE))
    # Write the zeros of the escapes before the escapes.
    tl.debug_barrier()
    start = tl.load(p_starts + row // 4)
    end = tl.load(p_starts + row // 4 + 1)
    for first in range(start, end, 32):
        o_e = first + tl.arange(0, 32)
        m_e = o_e < end
        b_place = tl.load(p_places + o_e, mask=m_e, other=0)
        b_column = f12_column(b_place)
        # Only the program that wrote the zero of an escape may overwrite it.
        m_here = m_e & (f12_row(b_place, block) == row) & (b_column // 256 // (BLOCK_J // 32) == tl.program_id(1))
        p_one = p_out.to(tl.pointer_type(tl.int16)) + i_out * SIZE + b_column
        tl.store(p_one, tl.load(p_values + o_e, mask=m_here, other=0), mask=m_here)
