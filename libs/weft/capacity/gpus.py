"""GPUs by name: memory, and the two rates that bound every step. Data sheet figures; what one reaches is less."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """`memory_gib` is what a process sees, below what is on the label; rates are 10^12 bytes and operations a second.

    `tflops` is dense bfloat16 with fp32 sums, `fp32_tflops` without tensor cores.
    """

    name: str
    memory_gib: float
    bandwidth_tb: float
    tflops: float
    fp32_tflops: float


GPUS = {
    "h100": Gpu("H100 80GB SXM", 79.1, 3.35, 989, 67),
    "h200": Gpu("H200 141GB SXM", 139.7, 4.8, 989, 67),
    "a100": Gpu("A100 80GB SXM", 79.1, 2.04, 312, 19.5),
    "l40s": Gpu("L40S 48GB", 44.4, 0.864, 362, 91.6),
    "rtx4090": Gpu("RTX 4090 24GB", 23.5, 1.008, 165, 82.6),
    "b200": Gpu("B200 180GB SXM", 178.3, 8.0, 2250, 75),
}
