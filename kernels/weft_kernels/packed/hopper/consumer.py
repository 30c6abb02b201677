"""Consumer warps: words become weights in registers, which are the left operand of the tensor cores."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_wait

from weft_kernels.packed.f12_tiles import f12_pair
from weft_kernels.packed.hopper.stream_k import finish_part, finish_tile, part_at, reduce_shared_tiles


@gluon.constexpr_function
def words_layout(rows: int, words: int) -> gl.DistributedLinearLayout:
    """As multipliers take them: of each 64 rows, a lane has words t and t + 4, and so on, of rows g and g + 8."""
    columns = [[0, 1 << bit] for bit in range(2, words.bit_length() - 1)]
    more_rows = [[1 << bit, 0] for bit in range(6, rows.bit_length() - 1)]
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[8, 0], *columns, *more_rows], lanes, [[16, 0], [32, 0]], [], [rows, words])


@gluon.jit
def words_of(
    words: gl.shared_memory_descriptor, stage: gl.tensor, PART: gl.constexpr, ROWS: gl.constexpr, layout: gl.constexpr
) -> tuple[gl.tensor, gl.tensor, gl.tensor]:
    """A part's rows of a step's words: [ROWS, words] of each plane."""
    b_0 = words.index(3 * stage).slice(PART * ROWS, ROWS, 0).load(layout)
    b_1 = words.index(3 * stage + 1).slice(PART * ROWS, ROWS, 0).load(layout)
    b_2 = words.index(3 * stage + 2).slice(PART * ROWS, ROWS, 0).load(layout)
    return b_0, b_1, b_2


@gluon.jit
def fourth(
    b_0: gl.tensor, b_1: gl.tensor, b_2: gl.tensor, b_factor: gl.tensor, FOURTH: gl.constexpr, operand: gl.constexpr
) -> gl.tensor:
    """[rows, 2 words] bfloat16: the weights themselves. b_factor: 2^base twice, as bfloat16; the product is exact."""
    b_pair = gl.inline_asm_elementwise(
        "fma.rn.bf16x2 $0, $1, $2, $3;",
        "=r,r,r,r",
        [f12_pair(b_0, b_1, b_2, 2 * FOURTH), b_factor, -0x7FFF8000],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )
    b_low = b_pair.to(gl.int16).to(gl.bfloat16, bitcast=True)
    b_high = (b_pair >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    b_both = gl.reshape(gl.join(b_low, b_high), [b_pair.shape[0], 2 * b_pair.shape[1]])
    # the halves of a word are neighbours among a multiplier's operands: all this is naming, and costs nothing
    return gl.convert_layout(b_both, operand, assert_trivial=True)


@gluon.jit
def consume(
    word_ring: gl.tuple,
    row_ring: gl.tuple,
    escape_ring: gl.tuple,
    p_bases: gl.tensor,
    p_starts: gl.tensor,
    outputs: gl.tuple,
    work: gl.tuple,
    PART: gl.constexpr,
    PARTS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
) -> None:
    """One part of a program's rows of weights, tile after tile. Escapes are further columns; they come in between."""
    words, w_full, _ = word_ring
    BLOCK_N: gl.constexpr = words.shape[1]
    BLOCK_M: gl.constexpr = row_ring[0].shape[1]
    ESCAPES: gl.constexpr = escape_ring[0].shape[1]
    ROWS: gl.constexpr = BLOCK_N // PARTS
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    layout: gl.constexpr = words_layout(ROWS, words.shape[2])
    _, _, _, _, _, _, count, _, _, _, num_n = work
    o_row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    chunk = 0
    i = 0
    part = part_at(i, p_starts, work, PART, BLOCK_N, ROWS)
    _, _, _, n, _, _ = part
    b_base = gl.load(p_bases + (n + o_row) // 64, mask=n + o_row < num_n, other=0)
    mbarrier.wait(w_full.index(0), 0)
    b_words = words_of(words, 0, PART, ROWS, layout)
    gdc_wait()
    while i < count:
        # what is to be known of the next tile is under way while this one is multiplied
        i_tile, begin, end, _, first_e, end_e = part
        next_i = i + end - begin
        next_part = part_at(next_i, p_starts, work, PART, BLOCK_N, ROWS)
        _, _, _, next_n, _, _ = next_part
        next_base = gl.load(p_bases + (next_n + o_row) // 64, mask=next_n + o_row < num_n, other=0)
        b_factor = ((b_base + 127) * 0x00800080)[:, None]
        acc = gl.zeros([ROWS, BLOCK_M], gl.float32, layout=mma)
        chunks = gl.cdiv(end_e - first_e, ESCAPES)
        pieces = gl.maximum(chunks, 1)
        for piece in range(pieces):
            first_here = i + (end - begin) * piece // pieces
            for here in range(first_here, i + (end - begin) * (piece + 1) // pieces):
                acc, b_words = _multiply_step(
                    acc, b_words, b_factor, word_ring, row_ring, here, count, PART, ROWS, left
                )
            if chunks > 0:
                acc = multiply_escapes(acc, escape_ring, chunk, PART, PARTS, ROWS, left)
                chunk += 1
        finish_tile(acc, outputs, i_tile, begin, end, work, PART, PARTS, ROWS, BLOCK_M, HAS_BIAS)
        i = next_i
        part = next_part
        b_base = next_base


@gluon.jit
def _multiply_step(
    acc: gl.tensor,
    b_words: gl.tuple,
    b_factor: gl.tensor,
    word_ring: gl.tuple,
    row_ring: gl.tuple,
    here: gl.tensor,
    count: gl.tensor,
    PART: gl.constexpr,
    ROWS: gl.constexpr,
    left: gl.constexpr,
) -> tuple[gl.tensor, gl.tuple]:
    """Each fourth becomes weights while the one before is multiplied. Returns the sums and the next step's words."""
    words, w_full, w_empty = word_ring
    xs, x_full, x_empty = row_ring
    W_STAGES: gl.constexpr = words.shape[0] // 3
    X_STAGES: gl.constexpr = xs.shape[0] // 4
    layout: gl.constexpr = words_layout(ROWS, words.shape[2])
    b_0, b_1, b_2 = b_words
    w_stage = here % W_STAGES
    x_stage = here % X_STAGES
    mbarrier.wait(x_full.index(x_stage), (here // X_STAGES) & 1)
    a_3 = fourth(b_0, b_1, b_2, b_factor, 3, left)
    acc = warpgroup_mma(a_3, xs.index(4 * x_stage).permute((1, 0)), acc, is_async=True)
    a_0 = fourth(b_0, b_1, b_2, b_factor, 0, left)
    acc = warpgroup_mma(a_0, xs.index(4 * x_stage + 1).permute((1, 0)), acc, is_async=True)
    acc, a_3 = warpgroup_mma_wait(1, deps=[acc, a_3])
    # That fourth took all three words, so they have come, and their place is free. A barrier alone does not
    # say so: loads may still be under way when warps come to it, and the next words overtake them.
    mbarrier.arrive(w_empty.index(w_stage), count=1)
    a_1 = fourth(b_0, b_1, b_2, b_factor, 1, left)
    acc = warpgroup_mma(a_1, xs.index(4 * x_stage + 2).permute((1, 0)), acc, is_async=True)
    acc, a_0 = warpgroup_mma_wait(1, deps=[acc, a_0])
    a_2 = fourth(b_0, b_1, b_2, b_factor, 2, left)
    acc = warpgroup_mma(a_2, xs.index(4 * x_stage + 3).permute((1, 0)), acc, is_async=True)
    # the next step's words, while this one is multiplied
    w_next = (here + 1) % W_STAGES
    mbarrier.wait(w_full.index(w_next), ((here + 1) // W_STAGES) & 1, pred=here + 1 < count)
    b_words = words_of(words, w_next, PART, ROWS, layout)
    acc, a_1, a_2 = warpgroup_mma_wait(0, deps=[acc, a_1, a_2])
    mbarrier.arrive(x_empty.index(x_stage), count=1)
    return acc, b_words


@gluon.jit
def multiply_escapes(
    acc: gl.tensor,
    escape_ring: gl.tuple,
    chunk: gl.tensor,
    PART: gl.constexpr,
    PARTS: gl.constexpr,
    ROWS: gl.constexpr,
    left: gl.constexpr,
) -> gl.tensor:
    """A chunk of a part's escapes: columns with one weight each, in its row."""
    far, far_rows, far_values, full, empty = escape_ring
    RING: gl.constexpr = far.shape[0] // PARTS
    ESCAPES: gl.constexpr = far.shape[1]
    slot = PART * RING + chunk % RING
    mbarrier.wait(full.index(slot), (chunk // RING) & 1)
    o_row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, left))
    b_at = far_rows.index(slot).load(gl.SliceLayout(0, left))
    b_value = far_values.index(slot).load(gl.SliceLayout(0, left))
    b_zero = gl.zeros([ROWS, ESCAPES], gl.bfloat16, layout=left)
    b_hot = gl.where(b_at[None, :] == o_row[:, None], b_value[None, :] + b_zero, b_zero)
    acc = warpgroup_mma(b_hot, far.index(slot), acc)
    mbarrier.arrive(empty.index(slot), count=1)
    return acc


@gluon.jit
def consume_ping_pong(
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
                    acc = _multiply_turn(acc, b_words, b_factor, xs, x_full, turns, turn, TURN, PART, FOURTHS, left)
                    mbarrier.arrive(x_empty.index(x_stage), count=1)
                # only now have words surely come to registers, see `multiplying.py`
                mbarrier.arrive(w_empty.index(w_stage), count=1)
            if piece + 1 < pieces:
                acc = multiply_escapes(acc, escape_ring, chunk, PART, 2, ROWS, left)
                chunk += 1
        finish_part(acc, outputs, i, i_tile, end - begin, n, work, PART, 2, ROWS, BLOCK_M, HAS_BIAS)
        i += end - begin
    reduce_shared_tiles(outputs, work, PART, 2, ROWS, BLOCK_M, HAS_BIAS)


@gluon.jit
def _multiply_turn(
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
    # The first part starts: its first wait passes at once.
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
