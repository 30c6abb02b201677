"""Which steps of which tiles a program multiplies: all of its warps go by this, each for itself.

Of tiles that several programs share, the one with a tile's last steps is who adds up. It does that tile last, and what
it has of another one's it does first: then parts are there long before they are asked for, or those who make them are
about to end as well. Where all add up, what is shared comes first: then all are at the same columns of their own tiles
at a time, which the cache of many left rows is glad of.

`work`: programs, the first of a program's steps in tiles that several share, how many of these come first and how many
last, these tiles, how many programs share them, all of its steps, steps of a tile, tiles of left rows one beside the
other, left rows, and rows of weights.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def first_step(program: gl.tensor, sharers: gl.tensor, total: gl.tensor) -> gl.tensor:
    """Of a program's share of so many steps, which as many of the first programs share as there are steps for."""
    return min(program, sharers) * total // sharers


@gluon.jit
def sharer_of(step: gl.tensor, sharers: gl.tensor, total: gl.tensor) -> gl.tensor:
    """Whose share a step is in."""
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
def work_of(
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
