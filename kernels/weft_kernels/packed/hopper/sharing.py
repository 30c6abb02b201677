"""What becomes of many left rows' sums: outputs, or parts in memory, which those that share a tile add up, some rows
each: one alone (`ends.py`) would take long over so many."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from weft_kernels.packed.hopper.fetching import all_threads_here
from weft_kernels.packed.hopper.splitting import first_step, segment_at, sharer_of

# programs whose parts are fetched at a time
_TOGETHER = gl.constexpr(4)
# of a tile's left rows: shares of what is to be added up
_SHARES = gl.constexpr(8)
_IMPATIENT = gl.constexpr(1 << 16)


@gluon.jit
def keep(
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
    """Write a tile, or what this program has of one, for `add_up`. i: the program's steps before these."""
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
def add_up(
    outputs: gl.tuple,
    work: gl.tuple,
    PART: gl.constexpr,
    PARTS: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    HAS_BIAS: gl.constexpr,
) -> None:
    """Of each tile that this program has shared, its share of the left rows, when all parts are there.

    It comes last, when nobody waits for this program any more: each has put down its parts before it asks for others'.
    """
    _, _, num_split, _, _, _, _, steps, _, _, _ = work
    i = 0
    while i < num_split:
        i_tile, begin, end = segment_at(i, work)
        if end - begin < steps:
            _add_up_tile(outputs, work, i_tile, PART, PARTS, ROWS, BLOCK_M, HAS_BIAS)
        i += end - begin


@gluon.jit
def _add_up_tile(
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
    p_bias, p_parts, p_arrived, p_out, patience = outputs
    _, _, _, _, split_tiles, sharers, _, steps, tiles_m, num_m, num_n = work
    start = i_tile * steps
    total = split_tiles * steps
    first_program = sharer_of(start, sharers, total)
    last_program = sharer_of(start + steps - 1, sharers, total)
    num_sharing = last_program - first_program + 1
    p_count = p_arrived + 2 * (i_tile * PARTS + PART)
    word = _wait_for_parts(p_count, num_sharing, patience)
    # where one has gone, those who come later add up its share as well: the last one does for sure
    is_one_gone = word >= _IMPATIENT
    share = gl.where(is_one_gone, 0, gl.program_id(0) - first_program)
    stride = gl.where(is_one_gone, 1, num_sharing)
    end_share = gl.where(word % _IMPATIENT == num_sharing, BLOCK_M // SHARE, 0)
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
def _wait_for_parts(p_count: gl.tensor, num_sharing: gl.tensor, patience: gl.tensor) -> gl.tensor:
    """How many programs have put down their parts, and 65,536 times how many had no patience to wait for the others.

    All programs are on the GPU at once and have nothing to wait for before that, so that it does not take long, but
    where another process keeps some of them off the GPU.
    """
    word = gl.atomic_add(p_count, 0, sem="acquire", scope="gpu")
    asked = 0
    while (word % _IMPATIENT < num_sharing) & (asked < patience):
        word = gl.atomic_add(p_count, 0, sem="acquire", scope="gpu")
        asked += 1
    if word % _IMPATIENT < num_sharing:
        word = gl.atomic_add(p_count, _IMPATIENT, sem="acq_rel", scope="gpu")
    return word
