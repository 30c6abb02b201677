"""F12 words times left rows on a Hopper GPU: warps that fetch and warps that consume, over rings in shared memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents

from weft_kernels.packed.hopper.consumer import consume, consume_ping_pong
from weft_kernels.packed.hopper.producer import produce_escapes, produce_rows, produce_words
from weft_kernels.packed.hopper.stream_k import assignment_of

# registers of a thread that only starts copies
_COPY_REGS = gl.constexpr(24)


@gluon.jit
def _ring(
    num_slots: gl.constexpr, arrivals: gl.constexpr
) -> tuple[gl.shared_memory_descriptor, gl.shared_memory_descriptor]:
    """A barrier for each slot that is filled by one and emptied by some."""
    full = gl.allocate_shared_memory(gl.int64, [num_slots, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [num_slots, 1], mbarrier.MBarrierLayout())
    for SLOT in gl.static_range(num_slots):
        mbarrier.init(full.index(SLOT), count=1)
        mbarrier.init(empty.index(SLOT), count=arrivals)
    return full, empty


@gluon.jit
def _escape_slots(
    num_slots: gl.constexpr, ESCAPES: gl.constexpr, BLOCK_M: gl.constexpr
) -> tuple[gl.shared_memory_descriptor, gl.shared_memory_descriptor, gl.shared_memory_descriptor]:
    """Of chunks of escapes: their columns of left rows, rows and values."""
    f_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ESCAPES, BLOCK_M], gl.bfloat16)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    far = gl.allocate_shared_memory(gl.bfloat16, [num_slots, ESCAPES, BLOCK_M], f_layout)
    far_rows = gl.allocate_shared_memory(gl.int32, [num_slots, ESCAPES], line)
    far_values = gl.allocate_shared_memory(gl.bfloat16, [num_slots, ESCAPES], line)
    return far, far_rows, far_values


_NOT_SPECIALIZED = ("num_m", "num_n", "tiles_m", "split_tiles", "own_tiles", "programs", "sharers", "steps", "size")


@gluon.jit(do_not_specialize=[*_NOT_SPECIALIZED, "max_polls"])
def f12_gemm(
    d_words: tma.tensor_descriptor,
    d_x: tma.tensor_descriptor,
    p_x: gl.tensor,
    p_transposed: gl.tensor,
    p_bases: gl.tensor,
    p_starts: gl.tensor,
    p_places: gl.tensor,
    p_values: gl.tensor,
    p_bias: gl.tensor,
    p_parts: gl.tensor,
    p_arrived: gl.tensor,
    p_out: gl.tensor,
    num_m: gl.tensor,
    num_n: gl.tensor,
    size: gl.tensor,
    tiles_m: gl.tensor,
    split_tiles: gl.tensor,
    own_tiles: gl.tensor,
    programs: gl.tensor,
    sharers: gl.tensor,
    steps: gl.tensor,
    max_polls: gl.tensor,
    stride_transposed: gl.tensor,
    HAS_BIAS: gl.constexpr,
    IS_TRANSPOSED: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_J: gl.constexpr,
    W_STAGES: gl.constexpr,
    X_STAGES: gl.constexpr,
    RING: gl.constexpr,
    ESCAPES: gl.constexpr,
    PARTS: gl.constexpr,
    PING_PONG: gl.constexpr,
    FOURTHS: gl.constexpr,
    REGS: gl.constexpr,
    FAR_REGS: gl.constexpr,
) -> None:
    """[num_m, num_n]. Tiles beyond a whole number a program are cut, see `splitting.py`; the others are each one's own.

    BLOCK_J: words of a row and plane in a step, 32 or 16; a row of weights is `steps` of them.
    """
    gl.static_assert(PARTS == 2 if PING_PONG else FOURTHS == 4, "parts take turns, or all of a step at once")
    words = gl.allocate_shared_memory(gl.int32, [3 * W_STAGES, BLOCK_N, BLOCK_J], d_words.layout)
    xs = gl.allocate_shared_memory(gl.bfloat16, [FOURTHS * X_STAGES, BLOCK_M, 2 * BLOCK_J], d_x.layout)
    far, far_rows, far_values = _escape_slots(PARTS * RING, ESCAPES, BLOCK_M)
    w_full, w_empty = _ring(W_STAGES, PARTS)
    x_full, x_empty = _ring(X_STAGES, PARTS)
    f_full, f_empty = _ring(PARTS * RING, 1)
    gdc_launch_dependents()
    work = assignment_of(programs, split_tiles, sharers, own_tiles, steps, tiles_m, num_m, num_n, PING_PONG)
    word_ring = (words, w_full, w_empty)
    row_ring = (xs, x_full, x_empty)
    escape_ring = (far, far_rows, far_values, f_full, f_empty)
    listed = (p_starts, p_places, p_values)
    lefts = (p_x, p_transposed, stride_transposed, size)
    outputs = (p_bias, p_parts, p_arrived, p_out, max_polls)
    _start_warps(
        *(d_words, d_x, word_ring, row_ring, escape_ring, lefts, listed, p_bases, outputs, work),
        *(HAS_BIAS, IS_TRANSPOSED, BLOCK_N, PARTS, PING_PONG, FOURTHS, REGS, FAR_REGS),
    )


@gluon.jit
def _start_warps(
    d_words: tma.tensor_descriptor,
    d_x: tma.tensor_descriptor,
    word_ring: gl.tuple,
    row_ring: gl.tuple,
    escape_ring: gl.tuple,
    lefts: gl.tuple,
    listed: gl.tuple,
    p_bases: gl.tensor,
    outputs: gl.tuple,
    work: gl.tuple,
    HAS_BIAS: gl.constexpr,
    IS_TRANSPOSED: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PARTS: gl.constexpr,
    PING_PONG: gl.constexpr,
    FOURTHS: gl.constexpr,
    REGS: gl.constexpr,
    FAR_REGS: gl.constexpr,
) -> None:
    """Which warps do what, and with how many registers a thread; those of the first line are there already."""
    p_starts, _, _ = listed
    if PING_PONG:
        turns, _ = _ring(2, 1)
        rings = (word_ring, row_ring, escape_ring, turns)
        gl.warp_specialize(
            [
                (consume_ping_pong, (rings, p_bases, p_starts, outputs, work, 0, FOURTHS, HAS_BIAS)),
                (consume_ping_pong, (rings, p_bases, p_starts, outputs, work, 1, FOURTHS, HAS_BIAS)),
                (produce_escapes, (lefts, listed, escape_ring, work, 0, 2, 1, BLOCK_N, IS_TRANSPOSED)),
                (produce_escapes, (lefts, listed, escape_ring, work, 1, 2, 1, BLOCK_N, IS_TRANSPOSED)),
                (produce_words, (d_words, word_ring, work)),
                (produce_rows, (d_x, row_ring, work, FOURTHS)),
            ],
            [4, 1, 1, 1, 1],
            [REGS, FAR_REGS, FAR_REGS, _COPY_REGS, _COPY_REGS],
        )
    elif PARTS == 2:
        gl.warp_specialize(
            [
                (consume, (word_ring, row_ring, escape_ring, p_bases, p_starts, outputs, work, 0, 2, HAS_BIAS)),
                (consume, (word_ring, row_ring, escape_ring, p_bases, p_starts, outputs, work, 1, 2, HAS_BIAS)),
                (produce_escapes, (lefts, listed, escape_ring, work, 0, 2, 1, BLOCK_N, IS_TRANSPOSED)),
                (produce_escapes, (lefts, listed, escape_ring, work, 1, 2, 1, BLOCK_N, IS_TRANSPOSED)),
                (produce_words, (d_words, word_ring, work)),
                (produce_rows, (d_x, row_ring, work, FOURTHS)),
            ],
            [4, 1, 1, 1, 1],
            [REGS, FAR_REGS, FAR_REGS, _COPY_REGS, _COPY_REGS],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (word_ring, row_ring, escape_ring, p_bases, p_starts, outputs, work, 0, 1, HAS_BIAS)),
                (produce_escapes, (lefts, listed, escape_ring, work, 0, 1, 2, BLOCK_N, IS_TRANSPOSED)),
                (produce_words, (d_words, word_ring, work)),
                (produce_rows, (d_x, row_ring, work, FOURTHS)),
            ],
            [2, 1, 1],
            [FAR_REGS, _COPY_REGS, _COPY_REGS],
        )
