"""What becomes of sums: outputs, or parts of them in memory, for the program that has the end of the same tile.

Parts lie in memory that says of each number whether it is there: where none has been put down there is a pattern that
no sum has, and whoever has taken a number puts the pattern back. So nobody waits for anything but the numbers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from weft_kernels.packed.hopper.splitting import sharer_of
from weft_kernels.packed.scratch import ABSENT

_ABSENT = gl.constexpr(ABSENT)  # as a float32 no number, and not the one that multipliers and adders make
_NO_NUMBER = gl.constexpr(0x7FFFFFFF)
# Those who are waited for began before, and put down their parts before they wait for anybody, so that parts do come;
# the launch fails rather than wait on.
_MOST_ASKED = gl.constexpr(1 << 24)


@gluon.jit
def keep(
    acc: gl.tensor,
    outputs: gl.tuple,
    i_tile: gl.tensor,
    begin: gl.tensor,
    end: gl.tensor,
    work: gl.tuple,
    PART: gl.constexpr,
    PARTS: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    HAS_BIAS: gl.constexpr,
) -> None:
    """Put down what this program has of a tile, steps begin to end, or write it when all its parts are there."""
    _, p_parts, _, _, _ = outputs
    _, _, _, _, _, _, _, steps, _, _, _ = work
    b_sums = _as_they_lie(acc, ROWS, BLOCK_M)
    if end < steps:
        b_bits = b_sums.to(gl.int32, bitcast=True)
        b_bits = gl.where(b_bits == _ABSENT, _NO_NUMBER, b_bits)
        place = (gl.program_id(0) * PARTS + PART) * (ROWS * BLOCK_M)
        gl.store(p_parts + place + _places(ROWS, BLOCK_M), b_bits)
    else:
        _complete(b_sums, outputs, i_tile, begin, work, PART, PARTS, ROWS, BLOCK_M, HAS_BIAS)


@gluon.jit
def _as_they_lie(acc: gl.tensor, ROWS: gl.constexpr, BLOCK_M: gl.constexpr) -> gl.tensor:
    """[ROWS BLOCK_M / 4, 4]: the four of a thread that belong to the same 8 left rows, thread by thread, 8 left rows
    after 8. All this is naming, and costs nothing."""
    gl.static_assert(ROWS == 64, "one product of a group of warps")
    b_sums = gl.reshape(acc, [4, 2, 8, BLOCK_M // 8, 4, 2])
    b_sums = gl.permute(b_sums, (3, 0, 2, 4, 1, 5))
    lying: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])
    return gl.convert_layout(gl.reshape(b_sums, [ROWS * BLOCK_M // 4, 4]), lying, assert_trivial=True)


@gluon.jit
def _places(ROWS: gl.constexpr, BLOCK_M: gl.constexpr) -> gl.tensor:
    """Of the sums of so many rows of weights and left rows, counted from the first."""
    lying: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0])
    o_four = gl.arange(0, ROWS * BLOCK_M // 4, layout=gl.SliceLayout(1, lying))
    return o_four[:, None] * 4 + gl.arange(0, 4, layout=gl.SliceLayout(0, lying))[None, :]


@gluon.jit
def _complete(
    b_sums: gl.tensor,
    outputs: gl.tuple,
    i_tile: gl.tensor,
    begin: gl.tensor,
    work: gl.tuple,
    PART: gl.constexpr,
    PARTS: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    HAS_BIAS: gl.constexpr,
) -> None:
    """Outputs of a tile that this program has the end of."""
    lying: gl.constexpr = b_sums.type.layout
    p_bias, p_parts, _, p_out, _ = outputs
    _, _, _, _, split_tiles, sharers, _, steps, tiles_m, num_m, num_n = work
    if begin > 0:
        first_program = sharer_of(i_tile * steps, sharers, split_tiles * steps)
        p_part = p_parts + PART * (ROWS * BLOCK_M) + _places(ROWS, BLOCK_M)
        # its own first, then always in the order of programs: the same sums every time
        for program in range(first_program, gl.program_id(0)):
            b_sums += _taken(p_part + program * (PARTS * ROWS * BLOCK_M))
    o_four = gl.arange(0, ROWS * BLOCK_M // 4, layout=gl.SliceLayout(1, lying))[:, None]
    o_of_four = gl.arange(0, 4, layout=gl.SliceLayout(0, lying))[None, :]
    n = i_tile // tiles_m * (PARTS * ROWS) + PART * ROWS
    n += o_four % 128 // 32 * 16 + o_of_four // 2 * 8 + o_four % 32 // 4
    m = i_tile % tiles_m * BLOCK_M + o_four // 128 * 8 + o_four % 4 * 2 + o_of_four % 2
    if HAS_BIAS:
        b_sums += gl.load(p_bias + n, mask=n < num_n, other=0.0).to(gl.float32)
    gl.store(p_out + m * num_n + n, b_sums.to(gl.bfloat16), mask=(n < num_n) & (m < num_m))


@gluon.jit
def _taken(p_part: gl.tensor) -> gl.tensor:
    """Sums that another program puts down, when all are there."""
    b_bits = gl.load(p_part, volatile=True)
    asked = 0
    while _is_any_absent(b_bits):
        b_bits = gl.load(p_part, volatile=True)
        asked += 1
        if asked > _MOST_ASKED:
            gl.inline_asm_elementwise("trap; mov.u32 $0, $1;", "=r,r", [asked], dtype=gl.int32, is_pure=False, pack=1)
    gl.store(p_part, gl.full_like(b_bits, _ABSENT))
    return b_bits.to(gl.float32, bitcast=True)


@gluon.jit
def _is_any_absent(b_bits: gl.tensor) -> gl.tensor:
    """The same for all threads, whenever each has looked."""
    return gl.sum(gl.sum((b_bits == _ABSENT).to(gl.int32), 1), 0) > 0
