"""What the multiplying warps of two parts do by turns: while products of one run, the other unpacks weights.

Products of many left rows take longer than their words take to come. Were both parts to unpack at once, multipliers
would wait for both; so one hands in products of a step, or of half of it, and then it is the other's turn.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_wait

from weft_kernels.packed.hopper.multiplying import fourth, multiply_escapes, words_layout, words_of
from weft_kernels.packed.hopper.sharing import add_up, keep
from weft_kernels.packed.hopper.splitting import part_at


@gluon.jit
def multiply_by_turns(
    rings: gl.tuple,
    p_bases: gl.tensor,
    p_starts: gl.tensor,
    outputs: gl.tuple,
    work: gl.tuple,
    PART: gl.constexpr,
    FOURTHS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
) -> None:
    """One of two parts of a program's rows of weights, tile after tile, as `multiply`.

    rings: of words, of left rows, of what escapes need, and a barrier for either part's turn. A turn takes FOURTHS, 2
    or 4, of the four that a step's words hold, in the order 3, 0, 1, 2.
    """
    word_ring, row_ring, escape_ring, turns = rings
    words, w_full, w_empty = word_ring
    xs, x_full, x_empty = row_ring
    W_STAGES: gl.constexpr = words.shape[0] // 3
    X_STAGES: gl.constexpr = xs.shape[0] // FOURTHS
    TURNS: gl.constexpr = 4 // FOURTHS
    BLOCK_M: gl.constexpr = xs.shape[1]
    ESCAPES: gl.constexpr = escape_ring[0].shape[1]
    BLOCK_N: gl.constexpr = words.shape[1]
    ROWS: gl.constexpr = BLOCK_N // 2
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    layout: gl.constexpr = words_layout(ROWS, words.shape[2])
    _, _, _, _, _, _, count, _, _, _, num_n = work
    o_row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    chunk = 0
    i = 0
    gdc_wait()
    while i < count:
        i_tile, begin, end, n, first_e, end_e = part_at(i, p_starts, work, PART, BLOCK_N, ROWS)
        b_base = gl.load(p_bases + (n + o_row) // 64, mask=n + o_row < num_n, other=0)
        b_factor = ((b_base + 127) * 0x00800080)[:, None]
        acc = gl.zeros([ROWS, BLOCK_M], gl.float32, layout=mma)
        pieces = gl.cdiv(end_e - first_e, ESCAPES) + 1
        for piece in range(pieces):
            first_here = i + (end - begin) * piece // pieces
            for here in range(first_here, i + (end - begin) * (piece + 1) // pieces):
                w_stage = here % W_STAGES
                mbarrier.wait(w_full.index(w_stage), (here // W_STAGES) & 1)
                for TURN in gl.static_range(TURNS):
                    turn = here * TURNS + TURN
                    x_stage = turn % X_STAGES
                    b_words = words_of(words, w_stage, PART, ROWS, layout)
                    acc = _take_turn(acc, b_words, b_factor, xs, x_full, turns, turn, TURN, PART, FOURTHS, left)
                    mbarrier.arrive(x_empty.index(x_stage), count=1)
                # only now have words surely come to registers, see `multiplying.py`
                mbarrier.arrive(w_empty.index(w_stage), count=1)
            if piece + 1 < pieces:
                acc = multiply_escapes(acc, escape_ring, chunk, PART, 2, ROWS, left)
                chunk += 1
        keep(acc, outputs, i, i_tile, end - begin, n, work, PART, 2, ROWS, BLOCK_M, HAS_BIAS)
        i += end - begin
    add_up(outputs, work, PART, 2, ROWS, BLOCK_M, HAS_BIAS)


@gluon.jit
def _take_turn(
    acc: gl.tensor,
    b_words: gl.tuple,
    b_factor: gl.tensor,
    xs: gl.shared_memory_descriptor,
    x_full: gl.shared_memory_descriptor,
    turns: gl.shared_memory_descriptor,
    turn: gl.tensor,
    TURN: gl.constexpr,
    PART: gl.constexpr,
    FOURTHS: gl.constexpr,
    left: gl.constexpr,
) -> gl.tensor:
    """Unpack, wait for this part's turn, hand in products, and wait for them while the other part hands in its own."""
    X_STAGES: gl.constexpr = xs.shape[0] // FOURTHS
    b_0, b_1, b_2 = b_words
    place = turn % X_STAGES * FOURTHS
    a_0 = fourth(b_0, b_1, b_2, b_factor, (TURN * FOURTHS + 3) % 4, left)
    a_1 = fourth(b_0, b_1, b_2, b_factor, TURN * FOURTHS, left)
    if FOURTHS == 4:
        a_2 = fourth(b_0, b_1, b_2, b_factor, 1, left)
        a_3 = fourth(b_0, b_1, b_2, b_factor, 2, left)
    mbarrier.wait(x_full.index(turn % X_STAGES), (turn // X_STAGES) & 1)
    # the first part begins: its first wait is for what nobody has to say
    mbarrier.wait(turns.index(PART), (turn + 1 + PART) & 1)
    acc = warpgroup_mma(a_0, xs.index(place).permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma(a_1, xs.index(place + 1).permute((1, 0)), acc, is_async=True)
    if FOURTHS == 4:
        acc = warpgroup_mma(a_2, xs.index(place + 2).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma(a_3, xs.index(place + 3).permute((1, 0)), acc, is_async=True)
    mbarrier.arrive(turns.index(1 - PART), count=1)
    if FOURTHS == 4:
        acc, a_0, a_1, a_2, a_3 = warpgroup_mma_wait(0, deps=[acc, a_0, a_1, a_2, a_3])
    else:
        acc, a_0, a_1 = warpgroup_mma_wait(0, deps=[acc, a_0, a_1])
    return acc
