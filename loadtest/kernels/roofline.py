"""Times one call after the other on a GPU, beside the measured limits of its memory and multipliers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

GIGA, TERA = 1e9, 1e12


@dataclass(frozen=True, slots=True)
class Work:
    """A call, the bytes it must move and the operations it must do; `torch_call` does the same by torch's own means."""

    name: str
    call: Callable[[], object]
    num_bytes: float
    operations: float = 0.0
    torch_call: Callable[[], object] | None = None


@dataclass(frozen=True, slots=True)
class Roofline:
    """Measured rates: bytes a second of a copy, operations a second of a bfloat16 product."""

    bandwidth: float
    operations: float

    def seconds(self, work: Work) -> float:
        """Return the least time: that of the slower of the two."""
        return max(work.num_bytes / self.bandwidth, work.operations / self.operations)


def seconds(call: Callable[[], object]) -> float:
    """Return the median time, with the cache flushed before each call."""
    from triton.testing import do_bench

    return float(do_bench(call, warmup=50, rep=200, return_mode="median")) / 1e3


def measure() -> Roofline:
    """Measure a copy of 1 GiB, and a product of two 8192 x 8192 matrices."""
    source = torch.empty(1 << 29, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    left, right = torch.randn(2, 8192, 8192, device="cuda").bfloat16()
    copied = 2 * source.nbytes / seconds(lambda: target.copy_(source))
    return Roofline(copied, 2 * 8192**3 / seconds(lambda: left @ right))


def print_works(kernels: Iterable[tuple[str, Iterable[Work]]]) -> None:
    """Print a line for each work. Works are made one by one, because each holds memory of the GPU."""
    roofline = measure()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"measured: {roofline.bandwidth / GIGA:,.0f} GB/s, {roofline.operations / TERA:,.0f} TFLOP/s")
    for title, works in kernels:
        print(f"\n{title:44}{'us':>10}{'GB/s':>9}{'TFLOP/s':>9}{'of limit':>10}{'torch us':>11}")
        for work in works:
            took = seconds(work.call)
            theirs = f"{seconds(work.torch_call) * 1e6:,.1f}" if work.torch_call else "-"
            rates = f"{work.num_bytes / took / GIGA:9,.0f}{work.operations / took / TERA:9,.1f}"
            print(f"{work.name:44}{took * 1e6:10,.1f}{rates}{roofline.seconds(work) / took:10.0%}{theirs:>11}")
