"""Stream-K: which steps of which tiles a program multiplies, and how partial sums of shared tiles are joined.

Of the programs that share a tile, the one with its last steps adds up. It does that tile last, and its part of another
tile first, so that parts are ready before they are needed. For many left rows all sharers add up, some rows each
(`finish_part`, `reduce_shared_tiles`); then shared tiles come first, which keeps all programs at the same columns.

Parts that one program adds up lie in memory where ABSENT marks a missing number (`finish_tile`); the reader writes
ABSENT back, and waits for nothing but the numbers.

`work`: number of programs, first shared step of this program, shared steps that come first, shared steps that come
last, shared tiles, programs that share them, all steps of this program, steps of a tile, tiles of left rows, left rows,
rows of weights.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from weft_kernels.packed.scratch import ABSENT

# older versions of Triton have it by another name
all_threads_here = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def first_step(program: gl.tensor, sharers: gl.tensor, total: gl.tensor) -> gl.tensor:
    """Of a program's share of so many steps, which as many of the first programs share as there are steps for."""
    return min(program, sharers) * total // sharers


@gluon.jit
def program_of_step(step: gl.tensor, sharers: gl.tensor, total: gl.tensor) -> gl.tensor:
    """Return the program that the step is assigned to."""
    return ((step + 1) * sharers + total - 1) // total - 1


@gluon.jit
def in_order(
    first: gl.tensor, end: gl.tensor, steps: gl.tensor, ALL_FIRST: gl.constexpr
) -> tuple[gl.tensor, gl.tensor]:
    """How many of these steps of two tiles at most come first, and how many last: those up to a tile's end, or none."""
    num_last = gl.where(first // steps < end // steps, (first // steps + 1) * steps - first, 0)
    if ALL_FIRST:
        num_last *= 0  # of the same type
    return end - first - num_last, num_last


@gluon.jit
def assignment_of(
    programs: gl.tensor,
    split_tiles: gl.tensor,
    sharers: gl.tensor,
    own_tiles: gl.tensor,
    steps: gl.tensor,
    tiles_m: gl.tensor,
    num_m: gl.tensor,
    num_n: gl.tensor,
    ALL_FIRST: gl.constexpr,
) -> gl.tuple:
    """This program's `work`, with own_tiles besides its share of the others."""
    pid = gl.program_id(0)
    first = first_step(pid, sharers, split_tiles * steps)
    num_first, num_last = in_order(first, first_step(pid + 1, sharers, split_tiles * steps), steps, ALL_FIRST)
    count = num_first + own_tiles * steps + num_last
    return programs, first, num_first, num_last, split_tiles, sharers, count, steps, tiles_m, num_m, num_n


@gluon.jit
def step_at(i: gl.tensor, work: gl.tuple) -> gl.tensor:
    """The i-th step of a program."""
    programs, first, num_first, num_last, split_tiles, _, count, steps, _, _, _ = work
    own = i - num_first
    own_step = (split_tiles + gl.program_id(0) + own // steps * programs) * steps + own % steps
    step = gl.where(own < 0, first + num_last + i, own_step)
    return gl.where(i < count - num_last, step, first + num_last + i - count)


@gluon.jit
def segment_at(i: gl.tensor, work: gl.tuple) -> tuple[gl.tensor, gl.tensor, gl.tensor]:
    """Tile, first and last step in it, of what a program multiplies from its i-th step on without leaving the tile."""
    _, _, num_first, _, _, _, _, steps, _, _, _ = work
    step = step_at(i, work)
    begin = step % steps
    return step // steps, begin, gl.where(i < num_first, gl.minimum(steps, begin + num_first - i), steps)


@gluon.jit
def part_at(
    i: gl.tensor,
    p_starts: gl.tensor,
    work: gl.tuple,
    PART: gl.constexpr,
    BLOCK_N: gl.constexpr,
    ROWS: gl.constexpr,
) -> gl.tuple:
    """What a part multiplies from its i-th step on without leaving the tile: tile, first and last step in it, the
    part's first row of weights, and its escapes there, the first and the one behind the last."""
    _, _, _, _, _, _, _, _, tiles_m, _, _ = work
    i_tile, begin, end = segment_at(i, work)
    n = i_tile // tiles_m * BLOCK_N + PART * ROWS
    first_e, end_e = _escapes_of(p_starts, n, begin, end, work, ROWS)
    return i_tile, begin, end, n, first_e, end_e


@gluon.jit
def _escapes_of(
    p_starts: gl.tensor, n: gl.tensor, begin: gl.tensor, end: gl.tensor, work: gl.tuple, ROWS: gl.constexpr
) -> tuple[gl.tensor, gl.tensor]:
    """Which escapes of some rows of weights go with these of their steps: the first, and the one behind the last."""
    _, _, _, _, _, _, _, steps, _, _, num_n = work
    start = gl.load(p_starts + gl.minimum(n, num_n) // 4)
    count = gl.load(p_starts + (gl.minimum(n + ROWS, num_n) + 3) // 4) - start
    return start + count * begin // steps, start + count * end // steps


_ABSENT = gl.constexpr(ABSENT)  # as a float32 no number, and not the one that multipliers and adders make
_NO_NUMBER = gl.constexpr(0x7FFFFFFF)
# The awaited programs started earlier and store their parts before they wait, so parts always arrive. After this many
# polls the launch fails.
_MOST_ASKED = gl.constexpr(1 << 24)


@gluon.jit
def finish_tile(
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
        first_program = program_of_step(i_tile * steps, sharers, split_tiles * steps)
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


# Programs with parts loaded at a time.
_TOGETHER = gl.constexpr(4)
# of a tile's left rows: shares of what is to be added up
_SHARES = gl.constexpr(8)
_GAVE_UP = gl.constexpr(1 << 16)


@gluon.jit
def finish_part(
    acc: gl.tensor,
    outputs: gl.tuple,
    i: gl.tensor,
    i_tile: gl.tensor,
    num_steps: gl.tensor,
    n: gl.tensor,
    work: gl.tuple,
    PART: gl.constexpr,
    PARTS: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    HAS_BIAS: gl.constexpr,
) -> None:
    """Write a tile, or what this program has of one, for `reduce_shared_tiles`. i: the program's steps before these."""
    mma: gl.constexpr = acc.type.layout
    p_bias, p_parts, p_arrived, p_out, _ = outputs
    _, _, _, _, _, _, _, steps, tiles_m, num_m, num_n = work
    o_row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, mma))
    o_m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, mma))
    if num_steps < steps:
        # a program has two such tiles at most: one that it begins with, and one that it ends with
        place = (2 * gl.program_id(0) + (i > 0).to(gl.int32)) * (PARTS * ROWS * BLOCK_M) + PART * ROWS * BLOCK_M
        gl.store(p_parts + place + o_m[None, :] * ROWS + o_row[:, None], acc)
        # all of the part is there before it counts
        all_threads_here()
        gl.atomic_add(p_arrived + 2 * (i_tile * PARTS + PART), 1, sem="acq_rel", scope="gpu")
    else:
        m_row = n + o_row < num_n
        if HAS_BIAS:
            acc += gl.load(p_bias + n + o_row, mask=m_row, other=0.0).to(gl.float32)[:, None]
        m = i_tile % tiles_m * BLOCK_M + o_m
        p_tile = p_out + m[None, :] * num_n + (n + o_row)[:, None]
        gl.store(p_tile, acc.to(gl.bfloat16), mask=m_row[:, None] & (m < num_m)[None, :])


@gluon.jit
def reduce_shared_tiles(
    outputs: gl.tuple,
    work: gl.tuple,
    PART: gl.constexpr,
    PARTS: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    HAS_BIAS: gl.constexpr,
) -> None:
    """Add up this program's share of the left rows of each shared tile, once all parts are stored.

    This runs last: each program stores its parts before it waits for others.
    """
    _, _, num_split, _, _, _, _, steps, _, _, _ = work
    i = 0
    while i < num_split:
        i_tile, begin, end = segment_at(i, work)
        if end - begin < steps:
            _reduce_tile(outputs, work, i_tile, PART, PARTS, ROWS, BLOCK_M, HAS_BIAS)
        i += end - begin


@gluon.jit
def _reduce_tile(
    outputs: gl.tuple,
    work: gl.tuple,
    i_tile: gl.tensor,
    PART: gl.constexpr,
    PARTS: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    HAS_BIAS: gl.constexpr,
) -> None:
    """Always in the order of programs: the same sums every time."""
    SHARE: gl.constexpr = max(8, BLOCK_M // _SHARES)
    PLACE: gl.constexpr = PARTS * ROWS * BLOCK_M
    flat: gl.constexpr = gl.BlockedLayout([1, 4], [128 // ROWS, ROWS // 4], [4, 1], [1, 0])
    p_bias, p_parts, p_arrived, p_out, max_polls = outputs
    _, _, _, _, split_tiles, sharers, _, steps, tiles_m, num_m, num_n = work
    start = i_tile * steps
    total = split_tiles * steps
    first_program = program_of_step(start, sharers, total)
    last_program = program_of_step(start + steps - 1, sharers, total)
    num_sharing = last_program - first_program + 1
    p_count = p_arrived + 2 * (i_tile * PARTS + PART)
    word = _wait_for_parts(p_count, num_sharing, max_polls)
    # If a program gave up, later programs add up its share too; the last one always does.
    is_one_gone = word >= _GAVE_UP
    share = gl.where(is_one_gone, 0, gl.program_id(0) - first_program)
    stride = gl.where(is_one_gone, 1, num_sharing)
    end_share = gl.where(word % _GAVE_UP == num_sharing, BLOCK_M // SHARE, 0)
    n = i_tile // tiles_m * (PARTS * ROWS) + PART * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(0, flat))
    o_part = (gl.arange(0, SHARE, layout=gl.SliceLayout(1, flat)) * ROWS)[:, None]
    o_part += PART * ROWS * BLOCK_M + gl.arange(0, ROWS, layout=gl.SliceLayout(0, flat))[None, :]
    while share < end_share:
        b_sum = gl.zeros([SHARE, ROWS], gl.float32, layout=flat)
        for some in range(first_program, last_program + 1, _TOGETHER):
            for NEXT in gl.static_range(_TOGETHER):
                other = some + NEXT
                place = 2 * other + (first_step(other, sharers, total) < start).to(gl.int32)
                p_part = p_parts + place * PLACE + share * (SHARE * ROWS) + o_part
                b_sum += gl.load(p_part, mask=(other <= last_program) & (o_part >= 0), other=0.0, cache_modifier=".cg")
        if HAS_BIAS:
            b_sum += gl.load(p_bias + n, mask=n < num_n, other=0.0).to(gl.float32)[None, :]
        m = i_tile % tiles_m * BLOCK_M + share * SHARE + gl.arange(0, SHARE, layout=gl.SliceLayout(1, flat))
        p_tile = p_out + m[:, None] * num_n + n[None, :]
        gl.store(p_tile, b_sum.to(gl.bfloat16), mask=(m < num_m)[:, None] & (n < num_n)[None, :])
        share += stride
    # the last one to go leaves both counts as they were, at 0
    if gl.atomic_add(p_count + 1, 1, sem="acq_rel", scope="gpu") == num_sharing - 1:
        gl.store(p_count, 0)
        gl.store(p_count + 1, 0)


@gluon.jit
def _wait_for_parts(p_count: gl.tensor, num_sharing: gl.tensor, max_polls: gl.tensor) -> gl.tensor:
    """How many programs have put down their parts, and 65,536 times how many had no max_polls to wait for the others.

    All programs are on the GPU at once and have nothing to wait for before that, so that it does not take long, but
    where another process keeps some of them off the GPU.
    """
    word = gl.atomic_add(p_count, 0, sem="acquire", scope="gpu")
    asked = 0
    while (word % _GAVE_UP < num_sharing) & (asked < max_polls):
        word = gl.atomic_add(p_count, 0, sem="acquire", scope="gpu")
        asked += 1
    if word % _GAVE_UP < num_sharing:
        word = gl.atomic_add(p_count, _GAVE_UP, sem="acq_rel", scope="gpu")
    return word
