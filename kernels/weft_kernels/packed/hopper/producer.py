"""What a program's fetching warps do: words and left rows into rings in shared memory, and what escapes need beside.

`work`: see `splitting.py`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.extra.cuda import gdc_wait

from weft_kernels.packed.f12_tiles import f12_column, f12_row
from weft_kernels.packed.hopper.stream_k import all_threads_here, part_at, step_at

# older versions of Triton have them by other names
_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def produce_words(d_words: tma.tensor_descriptor, ring: gl.tuple, work: gl.tuple) -> None:
    """[3, BLOCK_N, BLOCK_J] for each step. They have been there long ago: no launch is waited for."""
    words, full, empty = ring
    STAGES: gl.constexpr = words.shape[0] // 3
    BLOCK_N: gl.constexpr = words.shape[1]
    BLOCK_J: gl.constexpr = words.shape[2]
    _, _, _, _, _, _, count, steps, tiles_m, _, num_n = work
    for i in range(count):
        step = step_at(i, work)
        stage = i % STAGES
        mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), 3 * BLOCK_N * BLOCK_J * 4)
        n = step // steps // tiles_m * BLOCK_N
        for PLANE in gl.static_range(3):
            place = words.index(stage * 3 + PLANE)
            _load(d_words, [PLANE * num_n + n, step % steps * BLOCK_J], full.index(stage), place)


@gluon.jit
def produce_rows(d_x: tma.tensor_descriptor, ring: gl.tuple, work: gl.tuple, FOURTHS: gl.constexpr) -> None:
    """The left rows' columns that a step's words stand for: [BLOCK_M, 2 BLOCK_J] for each fourth of a block.

    A slot has all four in their order, or some: of the order 3, 0, 1, 2 then."""
    xs, full, empty = ring
    STAGES: gl.constexpr = xs.shape[0] // FOURTHS
    BLOCK_M: gl.constexpr = xs.shape[1]
    BLOCK_J: gl.constexpr = xs.shape[2] // 2
    PER_BLOCK: gl.constexpr = 32 // BLOCK_J
    TURNS: gl.constexpr = 4 // FOURTHS
    _, _, _, _, _, _, count, steps, tiles_m, _, _ = work
    gdc_wait()
    for i in range(count):
        step = step_at(i, work)
        m = step // steps % tiles_m * BLOCK_M
        k = step % steps // PER_BLOCK * 256 + step % PER_BLOCK * (2 * BLOCK_J)
        for TURN in gl.static_range(TURNS):
            turn = i * TURNS + TURN
            stage = turn % STAGES
            mbarrier.wait(empty.index(stage), ((turn // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), FOURTHS * BLOCK_M * BLOCK_J * 4)
            for NEXT in gl.static_range(FOURTHS):
                first = k + 64 * ((TURN * FOURTHS + NEXT + 3) % 4)
                _load(d_x, [m, first], full.index(stage), xs.index(stage * FOURTHS + NEXT))


@gluon.jit
def produce_escapes(
    lefts: gl.tuple,
    listed: gl.tuple,
    ring: gl.tuple,
    work: gl.tuple,
    PART: gl.constexpr,
    PARTS: gl.constexpr,
    WARPS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    IS_TRANSPOSED: gl.constexpr,
) -> None:
    """The columns of left rows that a part's escapes need, in chunks: [ESCAPES, BLOCK_M], and which rows they are of.

    They come from left rows that were turned before, or are looked up in those that were not.
    """
    ROWS: gl.constexpr = BLOCK_N // PARTS
    p_x, p_transposed, stride_transposed, size = lefts
    p_starts, p_places, p_values = listed
    far, far_rows, far_values, full, empty = ring
    RING: gl.constexpr = far.shape[0] // PARTS
    ESCAPES: gl.constexpr = far.shape[1]
    BLOCK_M: gl.constexpr = far.shape[2]
    _, _, _, _, _, _, count, _, tiles_m, num_m, _ = work
    chunk = 0
    i = 0
    i_tile, begin, end, n, first_e, end_e = part_at(i, p_starts, work, PART, BLOCK_N, ROWS)
    gdc_wait()
    while i < count:
        first_m = i_tile % tiles_m * BLOCK_M
        for next_e in range(first_e, end_e, ESCAPES):
            slot = PART * RING + chunk % RING
            b_value, b_row = _escapes(p_starts, p_places, p_values, next_e, end_e, n, work, ROWS, WARPS, ESCAPES)
            mbarrier.wait(empty.index(slot), ((chunk // RING) & 1) ^ 1)
            far_rows.index(slot).store(b_row)
            far_values.index(slot).store(b_value)
            place = far.index(slot)
            if IS_TRANSPOSED:
                _put_transposed(
                    p_transposed, stride_transposed, p_places, next_e, end_e, first_m, place, WARPS, BLOCK_M, ESCAPES
                )
            else:
                _put_looked_up(p_x, size, p_places, next_e, end_e, first_m, num_m, place, WARPS, BLOCK_M, ESCAPES)
            fence_async_shared()
            all_threads_here()
            mbarrier.arrive(full.index(slot), count=1)
            chunk += 1
        i += end - begin
        i_tile, begin, end, n, first_e, end_e = part_at(i, p_starts, work, PART, BLOCK_N, ROWS)


@gluon.jit
def _escapes(
    p_starts: gl.tensor,
    p_places: gl.tensor,
    p_values: gl.tensor,
    next_e: gl.tensor,
    end_e: gl.tensor,
    n: gl.tensor,
    work: gl.tuple,
    ROWS: gl.constexpr,
    WARPS: gl.constexpr,
    ESCAPES: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor]:
    """Value and row, counted from n, of a chunk; behind the last one rows are -1."""
    _, _, _, _, _, _, _, _, _, _, num_n = work
    line: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    o_e = next_e + gl.arange(0, ESCAPES, layout=line)
    m_e = o_e < end_e
    b_place = gl.load(p_places + o_e, mask=m_e, other=0)
    b_value = gl.load(p_values + o_e, mask=m_e, other=0.0)
    b_row = f12_row(b_place, 0)
    for NEXT in gl.static_range(1, ROWS // 64):
        following = n + 64 * NEXT
        edge = gl.load(p_starts + following // 4, mask=following < num_n, other=0x7FFFFFFF)
        b_row += gl.where(o_e >= edge, 64, 0)
    return b_value, gl.where(m_e, b_row, -1)


@gluon.jit
def _put_transposed(
    p_transposed: gl.tensor,
    stride_transposed: gl.tensor,
    p_places: gl.tensor,
    next_e: gl.tensor,
    end_e: gl.tensor,
    first_m: gl.tensor,
    place: gl.shared_memory_descriptor,
    WARPS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    ESCAPES: gl.constexpr,
) -> None:
    """A chunk's columns of left rows, of rows that lie one behind the other in each column."""
    LANES_M: gl.constexpr = min(32, BLOCK_M // 8)
    tile: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES_M, LANES_M], [WARPS, 1], [1, 0])
    o_m = first_m + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, tile))
    o_e = next_e + gl.arange(0, ESCAPES, layout=gl.SliceLayout(1, tile))
    b_k = f12_column(gl.load(p_places + o_e, mask=o_e < end_e, other=0))
    p_far = p_transposed + b_k[:, None] * stride_transposed + o_m[None, :]
    place.store(gl.load(p_far, mask=(o_e < end_e)[:, None], other=0.0, cache_modifier=".cg"))


@gluon.jit
def _put_looked_up(
    p_x: gl.tensor,
    size: gl.tensor,
    p_places: gl.tensor,
    next_e: gl.tensor,
    end_e: gl.tensor,
    first_m: gl.tensor,
    num_m: gl.tensor,
    place: gl.shared_memory_descriptor,
    WARPS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    ESCAPES: gl.constexpr,
) -> None:
    """The same from the left rows as they came: each number is a transaction of its own."""
    tile: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [WARPS, 1], [0, 1])
    o_m = first_m + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, tile))
    o_e = next_e + gl.arange(0, ESCAPES, layout=gl.SliceLayout(1, tile))
    b_k = f12_column(gl.load(p_places + o_e, mask=o_e < end_e, other=0))
    m_far = (o_e < end_e)[:, None] & (o_m < num_m)[None, :]
    place.store(gl.load(p_x + b_k[:, None] + o_m[None, :] * size, mask=m_far, other=0.0))
