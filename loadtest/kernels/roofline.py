"""Times one call after the other on a GPU, beside what the device's memory and multipliers were measured to deliver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

GIGA, TERA = 1e9, 1e12


@dataclass(frozen=True, slots=True)
class Work:
    """What a call must move and multiply at least. `torch_call`: the same by torch's own means, where there is one."""

    name: str
    call: Callable[[], object]
    num_bytes: float
    operations: float = 0.0
    torch_call: Callable[[], object] | None = None


@dataclass(frozen=True, slots=True)
class Roofline:
    """Measured, not read from a data sheet: bytes a second of a copy, operations a second of a bfloat16 product."""

    bandwidth: float
    operations: float

    def seconds(self, work: Work) -> float:
        """No faster than the slower of the two."""
        return max(work.num_bytes / self.bandwidth, work.operations / self.operations)


def seconds(call: Callable[[], object]) -> float:
    """Median, with the cache flushed before each call."""
    from triton.testing import do_bench

    return float(do_bench(call, warmup=50, rep=200, return_mode="median")) / 1e3


def measure() -> Roofline:
    """A copy of 1 GiB, and a product of two 8192 x 8192 matrices."""
    source = torch.empty(1 << 29, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    left, right = torch.randn(2, 8192, 8192, device="cuda").bfloat16()
    copied = 2 * source.nbytes / seconds(lambda: target.copy_(source))
    return Roofline(copied, 2 * 8192**3 / seconds(lambda: left @ right))


def report(title: str, make_works: Callable[[], list[Work]]) -> int:
    """Print one line for each work; the works are made only where there is a GPU. Returns the exit status."""
    if not torch.cuda.is_available():
        print(f"{title}: needs CUDA")
        return 0
    roofline = measure()
    print(f"{title} on {torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"measured: {roofline.bandwidth / GIGA:,.0f} GB/s, {roofline.operations / TERA:,.0f} TFLOP/s")
    print(f"{'':44}{'us':>10}{'GB/s':>9}{'TFLOP/s':>9}{'of limit':>10}{'torch us':>11}")
    for work in make_works():
        took = seconds(work.call)
        theirs = f"{seconds(work.torch_call) * 1e6:,.1f}" if work.torch_call else "-"
        rates = f"{work.num_bytes / took / GIGA:9,.0f}{work.operations / took / TERA:9,.1f}"
        print(f"{work.name:44}{took * 1e6:10,.1f}{rates}{roofline.seconds(work) / took:10.0%}{theirs:>11}")
    return 0
