"""F12 words in registers, and their product with rows. Device functions; `f12.py` defines the format."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from weft_kernels.packed.unpack import half_of, left_tile

_BLOCK_ROWS = tl.constexpr(64)
_ESCAPE_ROWS = tl.constexpr(4)
_COLUMN_BITS = tl.constexpr(26)
_COLUMNS = tl.constexpr((1 << 26) - 1)
# A word's half is its weight times 2^-base: 2^-126 to 2^-111. So much larger it is a number as others are.
_LIFT = tl.constexpr(112)
_LIFT_FACTOR = tl.constexpr(2.0**112)
# Triton's interpreter has no assembler, and cannot multiply bfloat16 anyway
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
_LIFT_PAIR = tl.constexpr((112 + 127) << 23 | (112 + 127) << 7)


@triton.jit
def product_f12(
    p_left: tl.tensor,
    p_transposed: tl.tensor,
    stride_transposed: tl.tensor,
    m_left: tl.tensor,
    b_scale: tl.tensor,
    p_words: tl.tensor,
    p_bases: tl.tensor,
    p_starts: tl.tensor,
    p_places: tl.tensor,
    p_values: tl.tensor,
    first_row: tl.tensor,
    end_row: tl.tensor,
    num_rows: tl.tensor,
    first_step: tl.tensor,
    last_step: tl.tensor,
    SIZE: tl.constexpr,
    SCALED: tl.constexpr,
    USES_PDL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """The weights are the left operand: they stay in registers from the mask to the multiplier.

    p_transposed: the left rows for escapes, a column every `stride_transposed` items. Few rows are read in place; with
    more rows, each number would be a transaction of its own. With USES_PDL, left rows are valid after `gdc_wait`.
    """
    tl.static_assert(BLOCK_K == 256 or BLOCK_K == 128, "a step takes a block of columns, or half the words of one")
    WORDS: tl.constexpr = (SIZE + 7) // 8
    EVEN: tl.constexpr = SIZE % 256 == 0
    BLOCK_J: tl.constexpr = BLOCK_K // 8
    STEPS: tl.constexpr = (WORDS + BLOCK_J - 1) // BLOCK_J
    ESCAPES: tl.constexpr = 128 if BLOCK_M <= 64 else 32
    o_row = first_row + tl.arange(0, BLOCK_N)
    m_row = o_row < end_row
    # escapes are further columns, each with one weight, in one row: the steps share them; the first ones are fetched
    # before the words, and multiplied after them
    end_tile = tl.minimum(first_row + BLOCK_N, end_row)
    start = tl.load(p_starts + first_row // _ESCAPE_ROWS)
    num_escapes = tl.load(p_starts + (end_tile + _ESCAPE_ROWS - 1) // _ESCAPE_ROWS) - start
    first_e = start + num_escapes * first_step // STEPS
    end_e = start + num_escapes * last_step // STEPS
    o_e = first_e + tl.arange(0, ESCAPES)
    b_place, b_value = _escapes_at(p_places, p_values, o_e, end_e)
    b_row = _row_of(p_starts, b_place, o_e, first_row, end_tile, BLOCK_N)
    if USES_PDL:
        gdc_wait()
    b_far = left_tile(p_transposed, m_left, b_scale, f12_column(b_place) * stride_transposed, o_e < end_e, SCALED)

    plane = tl.cast(num_rows, tl.int64) * WORDS
    p_row = p_words + o_row.to(tl.int64)[:, None] * WORDS
    b_acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in range(first_step, last_step):
        o_j = step * BLOCK_J + tl.arange(0, BLOCK_J)
        m_word = m_row[:, None] if EVEN else m_row[:, None] & (o_j < WORDS)[None, :]
        # [BLOCK_N, BLOCK_J] each
        b_0 = tl.load(p_row + o_j[None, :], mask=m_word, other=0)
        b_1 = tl.load(p_row + plane + o_j[None, :], mask=m_word, other=0)
        b_2 = tl.load(p_row + 2 * plane + o_j[None, :], mask=m_word, other=0)
        for HALF in tl.static_range(2):
            o_k, m_k = _columns_of(step, HALF, SIZE, BLOCK_K)
            b_left = left_tile(p_left, m_left, b_scale, o_k, m_k, SCALED, EVEN)
            b_acc = tl.dot(_half(b_0, b_1, b_2, HALF, b_left.dtype), b_left, b_acc, input_precision="ieee")
    b_base = tl.load(p_bases + o_row // _BLOCK_ROWS, mask=m_row, other=0)
    b_acc *= f12_scale(b_base, _LIFT)[:, None]

    for next_e in range(first_e, end_e, ESCAPES):
        o_e = next_e + tl.arange(0, ESCAPES)
        # [BLOCK_N, ESCAPES]: each value in its row
        m_here = (b_row[None, :] == o_row[:, None]) & (o_e < end_e)[None, :]
        b_hot = tl.where(m_here, b_value.to(tl.float32)[None, :], 0.0).to(b_far.dtype)
        b_acc = tl.dot(b_hot, b_far, b_acc, input_precision="ieee")
        o_e += ESCAPES
        b_place, b_value = _escapes_at(p_places, p_values, o_e, end_e)
        b_far = left_tile(p_transposed, m_left, b_scale, f12_column(b_place) * stride_transposed, o_e < end_e, SCALED)
        b_row = _row_of(p_starts, b_place, o_e, first_row, end_tile, BLOCK_N)
    return tl.trans(b_acc)


@triton.jit
def _columns_of(
    step: tl.tensor, HALF: tl.constexpr, SIZE: tl.constexpr, BLOCK_K: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Two fourths of a block, of each the columns of a step's words, and which of them there are."""
    WORDS: tl.constexpr = (SIZE + 7) // 8
    FULL: tl.constexpr = SIZE // 256 * 32
    BLOCK_J: tl.constexpr = BLOCK_K // 8
    o_in = tl.arange(0, 4 * BLOCK_J)
    o_column = step % (256 // BLOCK_K) * (2 * BLOCK_J) + o_in % (2 * BLOCK_J)
    # in a short last block a fourth has fewer
    width = 64 if SIZE % 256 == 0 else tl.where(step * BLOCK_J < FULL, 64, 2 * (WORDS - FULL))
    o_k = step // (256 // BLOCK_K) * 256 + (2 * HALF + o_in // (2 * BLOCK_J)) * width + o_column
    return o_k, (o_column < width) & (o_k < SIZE)


@triton.jit
def _escapes_at(
    p_places: tl.tensor, p_values: tl.tensor, o_e: tl.tensor, end_e: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Load the places and values of some escapes."""
    m_e = o_e < end_e
    return tl.load(p_places + o_e, mask=m_e, other=0), tl.load(p_values + o_e, mask=m_e, other=0.0)


@triton.jit
def _row_of(
    p_starts: tl.tensor,
    b_place: tl.tensor,
    o_e: tl.tensor,
    first_row: tl.tensor,
    end_row: tl.tensor,
    BLOCK_N: tl.constexpr,
) -> tl.tensor:
    """Return the rows of adjacent escapes of a few blocks; places hold only the row within a block."""
    block = first_row // _BLOCK_ROWS
    b_row = f12_row(b_place, block)
    for NEXT in tl.static_range(1, BLOCK_N // _BLOCK_ROWS + 2):
        following = (block + NEXT) * _BLOCK_ROWS
        begin = tl.load(p_starts + following // _ESCAPE_ROWS, mask=following < end_row, other=0x7FFFFFFF)
        b_row += tl.where(o_e >= begin, _BLOCK_ROWS, 0)
    return b_row


@triton.jit
def _half(b_0: tl.tensor, b_1: tl.tensor, b_2: tl.tensor, HALF: tl.constexpr, DTYPE: tl.constexpr) -> tl.tensor:
    """[rows, 4 words]: the weights of two fourths of a block of columns, times 2^(112 - base), in their order.

    The halves of a word are neighbours among a multiplier's operands as well: all this is naming, and costs nothing.
    """
    b_first = _fourth(f12_pair(b_0, b_1, b_2, 4 * HALF), DTYPE)
    b_second = _fourth(f12_pair(b_0, b_1, b_2, 4 * HALF + 2), DTYPE)
    b_both = tl.permute(tl.join(b_first, b_second), (0, 2, 1))
    return tl.reshape(b_both, [b_0.shape[0], 4 * b_0.shape[1]])


@triton.jit
def _fourth(b_pair: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Return [rows, 2 words]: the halves of words in column order."""
    if tl.bfloat16 == DTYPE and not _INTERPRETED:
        b_lifted = _lifted(b_pair)
        b_halves = tl.join(half_of(b_lifted, False, DTYPE), half_of(b_lifted, True, DTYPE))
    else:
        b_halves = tl.join(half_of(b_pair, False, tl.float32), half_of(b_pair, True, tl.float32))
        b_halves = (b_halves * _LIFT_FACTOR).to(DTYPE)
    return tl.reshape(b_halves, [b_pair.shape[0], 2 * b_pair.shape[1]])


@triton.jit
def _lifted(b_pair: tl.tensor) -> tl.tensor:
    """Both bfloat16 in each word, times 2^112: exact, and one instruction, which Triton would not make of it."""
    return tl.inline_asm_elementwise(
        "fma.rn.bf16x2 $0, $1, $2, $3;",
        "=r,r,r,r",
        [b_pair, _LIFT_PAIR, -0x7FFF8000],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def f12_pair(b_0: tl.tensor, b_1: tl.tensor, b_2: tl.tensor, SLOT: tl.constexpr) -> tl.tensor:
    """Return a slot with its neighbour; the even slot is the low half."""
    if SLOT < 2:
        b_pair = b_0 & -0x78007801
    elif SLOT < 4:
        b_pair = b_1 & -0x78007801
    elif SLOT < 6:
        b_pair = b_2 & -0x78007801
    else:
        b_low = (b_0 >> 11) & 0x000F000F | (b_1 >> 7) & 0x00F000F0
        b_pair = b_low | (b_2 >> 3) & 0x07000700 | (b_2 << 1) & -0x7FFF8000
    return b_pair


@triton.jit
def f12_place(o_j: tl.tensor, FOURTH: tl.constexpr, SIZE: tl.constexpr) -> tl.tensor:
    """Half the column of the lower half of words o_j of a row, in this fourth; the upper half's column follows."""
    FULL: tl.constexpr = SIZE // 256 * 32
    # in a short last block a fourth has fewer words
    width = 32 if SIZE % 256 == 0 else tl.where(o_j < FULL, 32, (SIZE + 7) // 8 - FULL)
    return o_j // 32 * 128 + FOURTH * width + o_j % 32


@triton.jit
def f12_scale(b_base: tl.tensor, LIFTED: tl.constexpr) -> tl.tensor:
    """Return 2^base divided by the power of two that words or rows were enlarged by."""
    return ((b_base + (127 - LIFTED)) << 23).to(tl.float32, bitcast=True)


@triton.jit
def f12_row(b_place: tl.tensor, block: tl.tensor) -> tl.tensor:
    """Return the row of an escape of this block."""
    return ((b_place >> _COLUMN_BITS) & (_BLOCK_ROWS - 1)) + block * _BLOCK_ROWS


@triton.jit
def f12_column(b_place: tl.tensor) -> tl.tensor:
    """Return the column of an escape."""
    return b_place & _COLUMNS
