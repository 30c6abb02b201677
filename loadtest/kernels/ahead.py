"""Compiles the tiles that are to be tried, on all processors, before a GPU is kept waiting for them one by one."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor

import torch

Job = tuple[int, int, dict[str, int]]
# of rows of weights: too few for each program to have a tile
OUTPUTS = 256


def compile_ahead(sizes: Iterable[tuple[int, int]]) -> None:
    """For matrices of so many columns and as many left rows. What is compiled is in Triton's cache."""
    began = time.monotonic()
    jobs = _jobs(sizes)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, min(len(jobs), (os.cpu_count() or 1) - 1)), spawn) as pool:
        failed = [said for said in pool.map(_compile, jobs) if said]
    seconds = time.monotonic() - began
    print(f"{len(jobs)} tiles compiled in {seconds:.0f} s, {len(failed)} refused", file=sys.stderr, flush=True)


def _jobs(sizes: Iterable[tuple[int, int]]) -> list[Job]:
    """What is slowest to compile first; how many programs share a product makes no other kernel."""
    from weft_kernels.packed import hopper, tuning

    found: dict[str, Job] = {}
    for columns, rows in sorted(set(sizes), reverse=True):
        usual = tuning.candidates("F12", rows) if rows <= 128 else []
        for_hopper = hopper.candidates(rows) if rows <= hopper.MOST_ROWS else []
        for tiles in (*for_hopper, *usual):
            kept = {name: size for name, size in tiles.items() if name not in ("programs", "EVEN")}
            is_any_width = hopper.is_hopper_tiles(tiles)
            found.setdefault(f"{is_any_width or columns} {sorted(kept.items())}", (columns, rows, kept))
    return sorted(found.values(), key=lambda job: not hopper.is_hopper_tiles(job[2]))


def _compile(job: Job) -> str:
    """What was said against it, if anything."""
    from weft_kernels.packed import hopper, pack_f12
    from weft_kernels.packed.linear import gemm
    from weft_kernels.packed.tuning import REFUSALS

    columns, rows, tiles = job
    weight = pack_f12(torch.randn(OUTPUTS, columns, device="cuda").bfloat16())
    x = torch.randn(rows, columns, device="cuda").bfloat16()
    if hopper.is_hopper_tiles(tiles) and not hopper.can_run(x, weight):
        return ""
    try:
        gemm(x, weight, None, dict(tiles))
    except REFUSALS as error:  # as tuning does, which leaves them out
        return str(error)
    return ""
