"""Linear layers on this CPU by number of rows: milliseconds, GFLOP/s and GB/s, beside the memory's measured speed.

    python -m loadtest.kernels.linear --threads 1,2
    python -m loadtest.kernels.linear --outputs 4096 --inputs 4096 --matrices 4

One pass multiplies `matrices` different weights, together larger than any cache; figures are medians over passes.
GB/s count the weights as they lie in memory. Nothing else should run: other processes take memory and cores.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from loadtest.report import table
from weft_kernels.linear import linear, pack
from weft_kernels.native import CHOICE, native

ROWS = (1, 2, 4, 8, 16, 32, 64, 256, 1024)
READ_BYTES = 512 << 20


def median_seconds(work: Callable[[], object], min_passes: int = 5, max_seconds: float = 2.0) -> float:
    """Return the median of at least `min_passes`, after one to warm up."""
    work()
    times: list[float] = []
    while len(times) < min_passes or (sum(times) < max_seconds and len(times) < 50):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def read_bandwidth() -> float:
    """Return the GB/s of summing a buffer that no cache holds."""
    buffer = torch.zeros(READ_BYTES // 4)
    return READ_BYTES / median_seconds(buffer.sum) / 1e9


def measure(weights: list[Tensor], num_rows: int) -> dict[str, tuple[float, int]]:
    """Return the seconds of a pass and the bytes of weights read, by way of computing."""
    x = torch.randn(num_rows, weights[0].shape[1])
    half = x.bfloat16()
    packed = [pack(weight, torch.float32) for weight in weights]
    packed_halves = [pack(weight, torch.bfloat16) for weight in weights]
    twelve = [pack(weight, torch.float32, is_resident=True) for weight in weights]
    twelve_halves = [pack(weight, torch.bfloat16, is_resident=True) for weight in weights]
    twelve_bytes = sum(weight.num_bytes for weight in twelve)
    wide = [weight.float() for weight in weights]
    num_bytes = sum(weight.num_bytes for weight in packed)
    wide_bytes = sum(weight.numel() for weight in weights) * 4
    return {
        "weft fp32": (median_seconds(lambda: [linear(x, weight) for weight in packed]), num_bytes),
        "weft bf16": (median_seconds(lambda: [linear(half, weight) for weight in packed_halves]), num_bytes),
        "weft fp32, 12 bits": (median_seconds(lambda: [linear(x, weight) for weight in twelve]), twelve_bytes),
        "weft bf16, 12 bits": (
            median_seconds(lambda: [linear(half, weight) for weight in twelve_halves]),
            twelve_bytes,
        ),
        "torch fp32": (median_seconds(lambda: [functional.linear(x, weight) for weight in wide]), wide_bytes),
        "torch fp32, w @ x^T": (median_seconds(lambda: [(weight @ x.T).T for weight in wide]), wide_bytes),
        "torch bf16": (
            median_seconds(lambda: [functional.linear(half, weight) for weight in weights]),
            wide_bytes // 2,
        ),
    }


def main() -> None:
    """Print one table for each number of threads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--outputs", type=int, default=5632)
    parser.add_argument("--inputs", type=int, default=1024)
    parser.add_argument("--matrices", type=int, default=12)
    options = parser.parse_args()
    weights = [torch.randn(options.outputs, options.inputs).bfloat16() for _ in range(options.matrices)]
    kernels = "C++" if native() else "torch"
    for threads in map(int, options.threads.split(",")):
        torch.set_num_threads(threads)
        title = f"{options.matrices} x [{options.outputs}, {options.inputs}] bf16, {threads} threads, {kernels}"
        print(f"{title} ({CHOICE}); memory reads {read_bandwidth():.1f} GB/s")
        rows: list[tuple[str, ...]] = []
        for num_rows in map(int, options.rows.split(",")):
            for way, (seconds, num_bytes) in measure(weights, num_rows).items():
                flops = 2 * num_rows * sum(weight.numel() for weight in weights)
                rates = f"{flops / seconds / 1e9:.0f}", f"{num_bytes / seconds / 1e9:.1f}"
                rows.append((f"{num_rows} rows, {way}", f"{seconds * 1e3:.2f}", *rates))
        print(table(("", "ms", "GFLOP/s", "GB/s"), rows))


if __name__ == "__main__":
    main()
