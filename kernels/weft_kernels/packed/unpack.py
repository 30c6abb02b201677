"""F12 back to bfloat16 on a GPU: rows of a weight one behind the other for a long prompt, or those of a table that
tokens ask for.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft_kernels.packed.f12 import BLOCK_ROWS, F12
from weft_kernels.packed.f12_tiles import f12_column, f12_pair, f12_row

BLOCK_WORDS = 512
# of a thread: what it stores of a slot is 16 bytes
THREAD_WORDS = 8


def unpack_rows(weight: F12, ids: Tensor | None = None, first: int = 0, end: int | None = None) -> Tensor:
    """[rows, columns] bfloat16, every bit as it was, of rows `first` to `end`; with `ids` [T] int64, of these rows
    instead, in this order. `first` begins a block."""
    assert first % BLOCK_ROWS == 0
    end = weight.rows if end is None else end
    num_rows = end - first if ids is None else len(ids)
    bits = torch.empty(num_rows, weight.columns, dtype=torch.int16, device=weight.device)
    if not bits.numel():
        return bits.view(torch.bfloat16)
    words = weight.words.shape[2]
    block_j = min(BLOCK_WORDS, triton.next_power_of_2(words))
    escapes = weight.starts, weight.places, weight.values.view(torch.int16)
    _unpack[num_rows, triton.cdiv(words, block_j)](
        *(weight.starts if ids is None else ids, weight.words, weight.bases, *escapes, bits, weight.rows, first),
        HAS_IDS=ids is not None,
        SIZE=weight.columns,
        BLOCK_J=block_j,
        num_warps=max(1, block_j // THREAD_WORDS // 32),
    )
    if ids is None and len(weight.places):
        # in the stream's order: the zeros among the words are there before
        _put_escapes[(triton.cdiv(num_rows, BLOCK_ROWS),)](
            *escapes, bits, first // BLOCK_ROWS, end, SIZE=weight.columns, num_warps=1
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
    first_row: tl.tensor,
    HAS_IDS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_J: tl.constexpr,
) -> None:
    """A run of words of one row; with ids its escapes too."""
    WORDS: tl.constexpr = (SIZE + 7) // 8
    i_out = tl.program_id(0).to(tl.int64)
    row = tl.load(p_ids + i_out) if HAS_IDS else first_row + i_out
    block = row // 64
    o_j = tl.program_id(1) * BLOCK_J + tl.arange(0, BLOCK_J)
    m_j = o_j < WORDS
    plane = tl.cast(num_rows, tl.int64) * WORDS
    p_row = p_words + row * WORDS + o_j
    b_0 = tl.load(p_row, mask=m_j, other=0)
    b_1 = tl.load(p_row + plane, mask=m_j, other=0)
    b_2 = tl.load(p_row + 2 * plane, mask=m_j, other=0)
    base = tl.load(p_bases + block) << 7
    p_to = p_out + i_out * SIZE
    for SLOT in tl.static_range(8):
        b_half = f12_pair(b_0, b_1, b_2, SLOT) >> (SLOT % 2 * 16)
        b_bits = b_half + tl.where(b_half & 0x0780 != 0, base, 0)
        o_k = SLOT * WORDS + o_j
        tl.store(p_to + o_k, b_bits.to(tl.int16), mask=m_j & (o_k < SIZE))
    if HAS_IDS:
        # the escapes' zeros have to be there before the escapes are
        tl.debug_barrier()
        start = tl.load(p_starts + block)
        end = tl.load(p_starts + block + 1)
        for first in range(start, end, 64):
            o_e = first + tl.arange(0, 64)
            m_e = o_e < end
            b_place = tl.load(p_places + o_e, mask=m_e, other=0)
            b_column = f12_column(b_place)
            m_here = m_e & (f12_row(b_place, block) == row) & (b_column % WORDS // BLOCK_J == tl.program_id(1))
            tl.store(p_to + b_column, tl.load(p_values + o_e, mask=m_here, other=0), mask=m_here)


@triton.jit
def _put_escapes(
    p_starts: tl.tensor,
    p_places: tl.tensor,
    p_values: tl.tensor,
    p_out: tl.tensor,
    first_block: tl.tensor,
    end_row: tl.tensor,
    SIZE: tl.constexpr,
) -> None:
    """Those of one block, where its rows have been unpacked."""
    block = first_block + tl.program_id(0)
    start = tl.load(p_starts + block)
    end = tl.load(p_starts + block + 1)
    for first in range(start, end, 128):
        o_e = first + tl.arange(0, 128)
        b_place = tl.load(p_places + o_e, mask=o_e < end, other=0)
        b_row = f12_row(b_place, block)
        p_to = p_out + (b_row - first_block * 64).to(tl.int64) * SIZE + f12_column(b_place)
        tl.store(p_to, tl.load(p_values + o_e, mask=o_e < end, other=0), mask=(o_e < end) & (b_row < end_row))
