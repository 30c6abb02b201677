"""Which steps of which tiles a program multiplies: all of its warps go by this, each for itself.

`work`: programs, a program's first step, how many of its steps are in tiles that several programs share, these tiles,
how many programs share them, all of its steps, steps of a tile, tiles of left rows one beside the other, left rows, and
rows of weights.
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
def step_at(i: gl.tensor, work: gl.tuple) -> gl.tensor:
    """The i-th step of a program: first its share of the tiles that several programs share, then tiles of its own."""
    programs, first, num_split, split_tiles, _, _, steps, _, _, _ = work
    own = i - num_split
    own_step = (split_tiles + gl.program_id(0) + own // steps * programs) * steps + own % steps
    return gl.where(own < 0, first + i, own_step)


@gluon.jit
def segment_at(i: gl.tensor, work: gl.tuple) -> tuple[gl.tensor, gl.tensor, gl.tensor]:
    """Tile, first and last step in it, of what a program multiplies from its i-th step on without leaving the tile."""
    _, _, num_split, _, _, _, steps, _, _, _ = work
    step = step_at(i, work)
    begin = step % steps
    return step // steps, begin, gl.where(i < num_split, gl.minimum(steps, begin + num_split - i), steps)


@gluon.jit
def escapes_of(
    p_starts: gl.tensor, n: gl.tensor, begin: gl.tensor, end: gl.tensor, work: gl.tuple, ROWS: gl.constexpr
) -> tuple[gl.tensor, gl.tensor]:
    """Which escapes of some rows of weights go with these of their steps: the first, and the one behind the last."""
    _, _, _, _, _, _, steps, _, _, num_n = work
    start = gl.load(p_starts + gl.minimum(n, num_n) // 4)
    count = gl.load(p_starts + (gl.minimum(n + ROWS, num_n) + 3) // 4) - start
    return start + count * begin // steps, start + count * end // steps
