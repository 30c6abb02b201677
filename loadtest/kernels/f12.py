"""F12 beside torch's bfloat16 (cuBLAS) over the matrices of Llama 8B and 70B, by rows, and unpacking. On a bare GPU.

    python -m loadtest.kernels.f12 [--tune] --out docs/results/f12.md

First it checks on this GPU that words are packed and unpacked bit for bit and that products agree. `--tune` tries tiles
for each matrix and number of rows and stores the quickest for serving on such a GPU (`packed/tuning.py`). Both sides
run as graphs, as decode steps do, over more copies of the matrix than a cache holds. The limit is the measured rate of
memory and multipliers, for 12-bit weights.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from loadtest.kernels.roofline import GIGA, TERA, Roofline, Work, measure
from weft_kernels.cuda_graphs import seconds_in_graph
from weft_kernels.packed import F12, pack_f12

# outputs, inputs: qkv, output, gate and up, down, head
SHAPES = {
    "8B qkv": (6144, 4096),
    "8B out": (4096, 4096),
    "8B gate up": (28_672, 4096),
    "8B down": (4096, 14_336),
    "head": (128_256, 4096),
    "70B qkv": (10_240, 8192),
    "70B out": (8192, 8192),
    "70B gate up": (57_344, 8192),
    "70B down": (8192, 28_672),
}
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)
# rows, and how many times as fast as bfloat16 is aimed for
GOALS = {(1, 64): 1.20, (128, 128): 1.05, (256, 1024): 0.85}
STD = 0.02
ESCAPE = 1e-9
ESCAPES_EVERY = 3000
# rows of weights of a compiled tile: too few for each program to have a tile
COMPILED_OUTPUTS = 256
Job = tuple[int, int, dict[str, int]]
# several times what a cache holds, in twelve bits
COPIED_BYTES = 300 << 20


@dataclass(frozen=True, slots=True)
class Line:
    """One matrix and number of rows; microseconds."""

    name: str
    rows: int
    ours: float
    theirs: float
    of_limit: float


def make_weight(outputs: int, inputs: int) -> Tensor:
    """Return normal weights, with as many escapes as published models have: one in 3,000."""
    weight = torch.empty(outputs, inputs, dtype=torch.bfloat16, device="cuda").normal_(0, STD)
    weight.view(-1)[::ESCAPES_EVERY] = ESCAPE
    return weight


def check(weight: Tensor, packed: F12) -> None:
    """Raises AssertionError where this GPU computes something else."""
    from weft_kernels.packed.f12_unpack import unpack_rows
    from weft_kernels.packed.hopper import MOST_ROWS
    from weft_kernels.packed.linear import linear_packed

    assert packed.suits
    assert torch.equal(unpack_rows(packed).view(torch.int16), weight.view(torch.int16))
    for rows in (1, 3, 12, 40, 100, 128, MOST_ROWS + 1):
        x = torch.randn(rows, weight.shape[1], device="cuda").bfloat16()
        found, expected = linear_packed(x, packed), functional.linear(x, weight)
        agree(found, expected)
        assert rows <= MOST_ROWS or torch.equal(found, expected)


def agree(found: Tensor, expected: Tensor) -> None:
    """Raises AssertionError where more than rounding differs."""
    error = (found - expected).float().norm() / expected.float().norm()
    assert error < 2e-3, f"{len(found)} rows: relative error {error:.1e}"


def copies_of(weight: Tensor, packed: F12) -> tuple[list[Tensor], list[F12]]:
    """Return copies of the matrix, plain and packed."""
    count = max(2, -(-COPIED_BYTES // packed.nbytes))
    plain = [weight, *(weight.clone() for _ in range(count - 1))]
    tensors = [[each.clone() for each in packed.tensors] for _ in range(count - 1)]
    return plain, [packed, *(F12(*packed.shape, *each) for each in tensors)]


def lines(roofline: Roofline, is_tuned: bool) -> Iterator[Line]:
    """Measure each matrix by rows."""
    from weft_kernels.packed.linear import linear_packed

    for name, (outputs, inputs) in SHAPES.items():
        weight = make_weight(outputs, inputs)
        packed = pack_f12(weight)
        check(weight, packed)
        all_plain, all_packed = copies_of(weight, packed)
        if is_tuned:
            tune_rows(weight, all_packed)
        for rows in ROWS:
            x = torch.randn(rows, inputs, device="cuda").bfloat16()
            work = Work(name, partial(linear_packed, x, packed), packed.nbytes, 2.0 * rows * outputs * inputs)
            ours = seconds_in_graph([partial(linear_packed, x, each) for each in all_packed])
            theirs = seconds_in_graph([partial(functional.linear, x, each) for each in all_plain])
            print(f"{name}, {rows} rows: {theirs / ours:.2f} times as fast", file=sys.stderr, flush=True)
            yield Line(name, rows, ours * 1e6, theirs * 1e6, roofline.seconds(work) / ours)


def tune_rows(weight: Tensor, all_packed: list[F12]) -> None:
    """Tune all numbers of rows that may be multiplied with packed words."""
    from weft_kernels.packed.hopper import MOST_ROWS
    from weft_kernels.packed.linear import linear_packed, tune
    from weft_kernels.packed.tuning import row_classes

    for rows in row_classes(rows for rows in ROWS if 1 < rows <= MOST_ROWS):
        x = torch.randn(rows, weight.shape[1], device="cuda").bfloat16()
        tune(x, all_packed, seconds_in_graph)
        agree(linear_packed(x, all_packed[0]), functional.linear(x, weight))


def unpacking() -> str:
    """Return the bytes of bfloat16 unpacked a second; a weight is 1.5 bytes read and 2 written."""
    from weft_kernels.packed.f12_unpack import unpack_rows

    weight = make_weight(*SHAPES["8B gate up"])
    _, all_packed = copies_of(weight, pack_f12(weight))
    rate = weight.nbytes / seconds_in_graph([partial(unpack_rows, each) for each in all_packed])
    return f"Unpacking to bfloat16: {rate / TERA:.2f} TB/s of bfloat16 (goal 2.2)."


def table(found: list[Line]) -> Iterator[str]:
    """Yield the lines of the table and the means."""
    yield "| matrix | rows | F12 us | bfloat16 us | times as fast | of the limit |"
    yield "|---|---|---|---|---|---|"
    for line in found:
        times = f"{line.ours:.1f} | {line.theirs:.1f} | {line.theirs / line.ours:.2f} | {line.of_limit:.0%}"
        yield f"| {line.name} | {line.rows} | {times} |"
    yield ""
    for rows in ROWS:
        logs = [math.log(line.theirs / line.ours) for line in found if line.rows == rows]
        yield f"- {rows} rows: {math.exp(sum(logs) / len(logs)):.2f} times as fast, geometric mean of {len(logs)}"
    yield ""
    for (least, most), goal in GOALS.items():
        logs = [math.log(line.theirs / line.ours) for line in found if least <= line.rows <= most]
        mean = math.exp(sum(logs) / len(logs))
        yield f"- {least} to {most} rows: {mean:.2f} times as fast, geometric mean of {len(logs)} (goal {goal:.2f})"


def compile_ahead(sizes: Iterable[tuple[int, int]]) -> None:
    """Compile the tiles to try for (columns, rows), on all processors, into Triton's cache.

    The GPU would wait for them one by one.
    """
    began = time.monotonic()
    jobs = _jobs(sizes)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, min(len(jobs), (os.cpu_count() or 1) - 1)), spawn) as pool:
        failed = [said for said in pool.map(_compile, jobs) if said]
    seconds = time.monotonic() - began
    print(f"{len(jobs)} tiles compiled in {seconds:.0f} s, {len(failed)} refused", file=sys.stderr, flush=True)


def _jobs(sizes: Iterable[tuple[int, int]]) -> list[Job]:
    """Return the slowest compilations first; the number of programs that share a product makes no other kernel."""
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
    """Return the error of a refused tile, or ""."""
    from weft_kernels.packed import hopper, pack_f12
    from weft_kernels.packed.linear import gemm
    from weft_kernels.packed.tuning import REFUSALS

    columns, rows, tiles = job
    weight = pack_f12(torch.randn(COMPILED_OUTPUTS, columns, device="cuda").bfloat16())
    x = torch.randn(rows, columns, device="cuda").bfloat16()
    if hopper.is_hopper_tiles(tiles) and not hopper.can_run(x, weight):
        return ""
    try:
        gemm(x, weight, None, dict(tiles))
    except REFUSALS as error:  # tuning leaves these out
        return str(error)
    return ""


def main() -> int:
    """Print the table and write it; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tune", action="store_true")
    options = parser.parse_args()
    out: Path | None = options.out
    if not torch.cuda.is_available():
        print("F12: needs CUDA")
        return 0
    if options.tune:
        compile_ahead({(inputs, rows) for _, inputs in SHAPES.values() for rows in ROWS if rows > 1})
    with torch.inference_mode():
        text = report(options.tune)
    if options.tune:
        from weft_kernels.packed.tuning import table_of

        (tiles := table_of(torch.cuda.get_device_name())).save()
        text.append(f"\nTiles tuned: {tiles.path.name}")
    print("\n".join(text))
    if out is not None:
        out.write_text("\n".join(text) + "\n")
    return 0


def report(is_tuned: bool) -> list[str]:
    """Return the report in Markdown."""
    roofline = measure()
    return [
        f"# F12 and bfloat16 on {torch.cuda.get_device_name()}, torch {torch.__version__}",
        "",
        f"Measured: {roofline.bandwidth / GIGA:,.0f} GB/s, {roofline.operations / TERA:,.0f} TFLOP/s.",
        unpacking(),
        "",
        *table(list(lines(roofline, is_tuned))),
    ]


if __name__ == "__main__":
    sys.exit(main())
