"""F12 words times left rows on Hopper GPUs (H100, H200), for 2 to 1,024 left rows. Launcher and tiles.

Triton's own language leaves to the compiler which warps copy and which multiply; a kernel that waits for memory is
quicker where that is said, and Gluon, Triton's lower level, lets one say it. A program stays for the whole product:

- one warp starts copies of words, and one of left rows, into rings of slots in shared memory, by the copy engine (TMA);
- one or two groups of four warps, each with its own rows of weights, take words into registers, where they become
  weights, and multiply; the next words come while multipliers work. Of many left rows, where products take longer than
  words take to come, two groups do so by turns (`alternating.py`);
- one or two warps fetch the columns of left rows that escapes need.

Programs are as many as fit on the GPU at once. Of the tiles each gets as many as there are for all, and what is left
is shared in equal numbers of steps. Of those that share a tile, the one that has its end adds up their sums; of many
left rows, where that is much, all do, some left rows each. The slow twin is `packed/linear.py`'s, which gives the same
to rounding.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from weft_kernels.launch import cdiv, next_power_of_2
from weft_kernels.packed.f12 import BLOCK_COLUMNS, F12, SLOTS
from weft_kernels.packed.scratch import absent_sums, counters, transpose_rows

Tiles = dict[str, int]
MOST_ROWS = 1024
# where escapes need more columns of left rows than so few numbers, a kernel turns them before
MOST_LOOKED_UP = 8
# two of each part of a tile that is shared, of which there are fewer than programs
NUM_COUNTERS = 1 << 12
# where all add up: how often one asks whether the others' parts are there, a microsecond each; then it leaves its own
MAX_POLLS = 10_000

# PER_MULTIPROCESSOR: programs at a time. MAX_REGS: of a thread as it is launched, so that so many programs fit.
_NARROW = {"BLOCK_N": 64, "BLOCK_J": 32, "W_STAGES": 3, "X_STAGES": 3, "PARTS": 1, "ESCAPES": 32}
_PAIR = {**_NARROW, "PER_MULTIPROCESSOR": 2, "MAX_REGS": 112}
_ALONE = {**_NARROW, "PER_MULTIPROCESSOR": 1, "MAX_REGS": 128}
_WIDE = {
    "BLOCK_N": 128,
    "BLOCK_J": 32,
    "W_STAGES": 3,
    "X_STAGES": 2,
    "PARTS": 2,
    "PER_MULTIPROCESSOR": 1,
    "RING": 1,
    "ESCAPES": 32,
    "MAX_REGS": 144,
    "REGS": 168,
    "FAR_REGS": 96,
}
_PING_PONG = {
    "BLOCK_N": 128,
    "PARTS": 2,
    "PER_MULTIPROCESSOR": 1,
    "RING": 1,
    "ESCAPES": 16,
    "PING_PONG": 1,
}


def can_run(x: Tensor, weight: F12) -> bool:
    """Whether these can be multiplied so: bfloat16 on such a GPU, in whole blocks of columns."""
    if not x.is_cuda or x.dtype != torch.bfloat16 or weight.columns % BLOCK_COLUMNS or not weight.words.numel():
        return False
    return x.data_ptr() % 16 == 0 and len(x) <= MOST_ROWS and _is_hopper(x.device)


def is_hopper_tiles(tiles: Tiles) -> bool:
    """Or for the kernels of all GPUs."""
    return "W_STAGES" in tiles


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


@cache
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def candidates(num_rows: int) -> list[Tiles]:
    """Tiles worth trying for so many left rows, the likeliest first."""
    return [{**tiles, "EVEN": even} for tiles in _candidates(num_rows) for even in (1, 0)]


def _candidates(num_rows: int) -> list[Tiles]:
    if num_rows <= 8:
        return [
            {**_PAIR, "BLOCK_M": 8, "RING": 4},
            {**_ALONE, "BLOCK_M": 8, "W_STAGES": 4, "RING": 4},
            {**_ALONE, "BLOCK_M": 8, "W_STAGES": 8, "X_STAGES": 6, "RING": 4},
        ]
    if num_rows <= 16:
        return [
            {**_PAIR, "BLOCK_M": 16, "RING": 3},
            {**_ALONE, "BLOCK_M": 16, "RING": 3},
            {**_ALONE, "BLOCK_M": 16, "W_STAGES": 7, "X_STAGES": 5, "RING": 3},
        ]
    if num_rows <= 32:
        return [
            {**_PAIR, "BLOCK_M": 32, "X_STAGES": 2, "RING": 2},
            {**_ALONE, "BLOCK_M": 32, "W_STAGES": 5, "X_STAGES": 4, "RING": 3, "MAX_REGS": 168},
        ]
    if num_rows <= 64:
        return [
            {**_WIDE, "BLOCK_M": 64},
            {**_ALONE, "BLOCK_M": 64, "W_STAGES": 4, "RING": 2, "MAX_REGS": 192},
        ]
    square = [
        {**_PING_PONG, "BLOCK_M": 128, "BLOCK_J": 32, "W_STAGES": 3, "X_STAGES": 2, "FOURTHS": 2},
        {**_PING_PONG, "BLOCK_M": 128, "BLOCK_J": 16, "W_STAGES": 4, "X_STAGES": 3, "FOURTHS": 4},
    ]
    if num_rows <= 128:
        narrow = {**_ALONE, "BLOCK_M": 128, "X_STAGES": 2, "RING": 1, "MAX_REGS": 224}
        return [*square, narrow]
    return [
        {**_PING_PONG, "BLOCK_M": 256, "BLOCK_J": 16, "W_STAGES": 3, "X_STAGES": 2, "FOURTHS": 4},
        *square,
    ]


def gemm(x: Tensor, weight: F12, bias: Tensor | None, tiles: Tiles) -> Tensor:
    """x: [M, columns], contiguous, of which `fits` says yes. Returns [M, rows]. One stream multiplies at a time."""
    from weft_kernels.packed.hopper.kernel import f12_gemm

    tiles = {"REGS": 224, "FAR_REGS": 64, "PING_PONG": 0, "FOURTHS": 4, **tiles}
    resident, max_regs = tiles.pop("PER_MULTIPROCESSOR"), tiles.pop("MAX_REGS", 0)
    num_rows, size = x.shape
    block_m, block_n, block_j = tiles["BLOCK_M"], tiles["BLOCK_N"], tiles["BLOCK_J"]
    tiles_m, steps = cdiv(num_rows, block_m), size // (SLOTS * block_j)
    num_tiles = tiles_m * cdiv(weight.rows, block_n)
    most = min(_num_multiprocessors(x.device) * resident, num_tiles * steps)
    programs, own_tiles, split_tiles, sharers = split(num_tiles, steps, most, bool(tiles.pop("EVEN", 0)))
    out = x.new_empty(num_rows, weight.rows)
    counts = counters(x.device, NUM_COUNTERS)
    # a program has parts of two tiles at most, or of one, and of another one the end
    if tiles["PING_PONG"]:
        assert 2 * split_tiles * tiles["PARTS"] <= NUM_COUNTERS
        parts = torch.empty(2 * programs * block_m * block_n, dtype=torch.float32, device=x.device)
    else:
        parts = absent_sums(x.device, next_power_of_2(programs * block_m * block_n))
    is_transposed = block_m > MOST_LOOKED_UP
    transposed = transpose_rows(x, tiles_m * block_m) if is_transposed else x
    f12_gemm[(programs,)](
        *_descriptors(x, weight, block_m, block_n, block_j),
        *(x, transposed, *weight.tensors[1:], x if bias is None else bias, parts, counts, out),
        *(num_rows, weight.rows, size, tiles_m, split_tiles, own_tiles, programs, sharers, steps),
        tiles.pop("MAX_POLLS", MAX_POLLS),
        transposed.stride(0),
        HAS_BIAS=bias is not None,
        IS_TRANSPOSED=is_transposed,
        num_warps=4,
        launch_pdl=True,  # see `weft_kernels.launch`: these GPUs can do that
        **({"maxnreg": max_regs} if max_regs else {}),
        **tiles,
    )
    return out


def split(num_tiles: int, steps: int, programs: int, is_even: bool) -> tuple[int, int, int, int]:
    """How many programs, how many tiles each has for itself, how many are left, and how many programs share these.

    is_even: as many share each of them, so that none has parts of two, where some may have no share."""
    own_tiles, split_tiles = divmod(num_tiles, programs)
    sharers = max(1, min(programs, split_tiles * steps))
    if is_even and split_tiles:
        sharers -= sharers % split_tiles
    return (programs if own_tiles else sharers), own_tiles, split_tiles, sharers


def _descriptors(x: Tensor, weight: F12, block_m: int, block_n: int, block_j: int) -> tuple[object, object]:
    """What the copy engine has to know of words and of left rows: of either, a slot's rows are 4 block_j bytes."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    words = weight.words.view(-1, weight.words.shape[2])
    of_words, of_rows = _layouts(block_j)
    return (
        TensorDescriptor.from_tensor(words, [block_n, block_j], of_words),
        TensorDescriptor.from_tensor(x, [block_m, 2 * block_j], of_rows),
    )


@cache
def _layouts(block_j: int) -> tuple[Any, Any]:
    from triton.experimental.gluon.language import NVMMASharedLayout

    return NVMMASharedLayout(4 * block_j, 32, 2), NVMMASharedLayout(4 * block_j, 16, 2)
