"""The engine over batch and context: decode, prefill and mixed load, each beside the limit measured in the same run.

    python -m loadtest.engine.sweep --shape 213M
    python -m loadtest.engine.sweep --shape 213M --threads 2 --batches 1,8 --contexts 128,8192 --out results/

Random weights of a published shape (`loadtest/engine/shapes.py`), on a CPU or a GPU. Points that do not fit have a
note with the reason. A second run with the same --out continues the first one.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from loadtest.engine.drive import Bench, Settings
from loadtest.engine.idle import measure_idle
from loadtest.engine.limits import limits_of, measure
from loadtest.engine.results import Point, Results, write_report
from loadtest.engine.shapes import SHAPES, Shape
from loadtest.report import percentile
from weft.capacity.layout import GIB, Gpu
from weft.capacity.sizes import RequestedSizes, choose_sizes

CPU_BATCHES, CPU_CONTEXTS, CPU_PROMPTS = (1, 2, 4, 8, 16, 32, 64), (128, 1024, 8192, 32_768), (512, 2048, 8192)
GPU_BATCHES, GPU_CONTEXTS = (1, 8, 32, 64, 128, 256), (128, 1024, 8192, 32_768)
GPU_PROMPTS = (512, 2048, 8192, 32_768)
MIXED_PROMPT, MIXED_CONTEXT = 2048, 1024
Figures = dict[str, float | str | None]


@dataclass(frozen=True)
class Grid:
    """The points, with `steps` of each decode. A point whose limit alone takes over `point_seconds` is left out."""

    batches: Sequence[int]
    contexts: Sequence[int]
    prompts: Sequence[int]
    mixed: Sequence[int]
    steps: int
    point_seconds: float

    def points(self, shape: str) -> list[Point]:
        """Return the important points first, for a run that is cut short."""
        near = sorted(self.contexts, key=lambda context: (context != MIXED_CONTEXT, context))
        decodes = [Point(shape, "decode", batch, context) for context in near for batch in self.batches]
        prefills = [Point(shape, "prefill", 1, prompt) for prompt in self.prompts]
        mixed = [Point(shape, "mixed", batch, MIXED_CONTEXT, MIXED_PROMPT) for batch in self.mixed]
        first = len(self.batches)
        return [*decodes[:first], *prefills, *mixed, *decodes[first:]]


class ShapeFailed(Exception):
    """The engine has ended at a point, so the shape's other points are not measured."""


class Sweep:
    """One shape's points on one engine."""

    def __init__(self, shape: Shape, settings: Settings, gpu: Gpu, grid: Grid) -> None:
        self.bench = Bench(shape, settings)
        self.shape, self.settings, self.gpu, self.grid = shape, settings, gpu, grid

    def run(self, results: Results) -> None:
        """Measure all points that are missing. Raises ShapeFailed after a note on the point, which stays skipped."""
        for point in self.grid.points(self.shape.name):
            if not results.has(point):
                self._run_one(point, results)

    def close(self) -> None:
        """Stop the engine of this shape."""
        self.bench.close()

    def least_seconds(self, point: Point) -> float:
        """Return the time of a point at the limits."""
        limits = limits_of(self.bench.config, self.gpu, self.settings.dtype, point.tokens, self.settings.chunk_tokens)
        if point.kind == "prefill":
            return 3 * point.tokens / limits.prefill()
        return 3 * self.grid.steps * point.batch / limits.decode(point.batch)

    def _run_one(self, point: Point, results: Results) -> None:
        lacks = self.bench.lacks(point.batch + (point.prompt > 0), point.tokens + point.prompt + self.grid.steps + 8)
        if lacks:
            return results.skip(point, f"does not fit: {lacks}")
        least = self.least_seconds(point)
        if least > self.grid.point_seconds:
            return results.skip(point, f"left out: {least:,.0f} s at the limit, {self.grid.point_seconds:,.0f} allowed")
        if results.seconds_left < 2 * least + 5:
            return results.skip(point, "no time left", is_late=True)
        measure_point = {"decode": self._decode, "prefill": self._prefill, "mixed": self._mixed}[point.kind]
        try:
            figures = measure_point(point)
        except Exception as error:  # from a compiler, a driver, an allocator or the engine
            said = str(error).splitlines() or [""]
            results.skip(point, f"failed: {type(error).__name__}: {said[0]}")
            raise ShapeFailed(f"{point.key}: {type(error).__name__}") from error
        results.add(point, **figures, memory_gib=self.bench.memory_bytes() / GIB)
        return None

    def _decode(self, point: Point) -> Figures:
        batch, context, steps = point.batch, point.tokens, self.grid.steps
        limit = limits_of(self.bench.config, self.gpu, self.settings.dtype, context, self.settings.chunk_tokens)
        self.bench.decode(batch, context, 3)  # compiles, captures, allocates
        seconds = statistics.median(self.bench.decode(batch, context, steps))
        idle = measure_idle(self.settings.device, lambda: self.bench.decode(batch, context, steps))
        return {
            "ms": seconds * 1e3,
            "tok_s": batch / seconds,
            "of_limit": batch / seconds / limit.decode(batch),
            "idle_ms": idle.seconds * 1e3 if idle.seconds is not None else None,
            "idle_reason": idle.reason,
            "kv_gib": self.bench.kv_bytes(batch, context) / GIB,
        }

    def _prefill(self, point: Point) -> Figures:
        prompt, chunk = point.tokens, min(point.tokens, self.settings.chunk_tokens)
        limit = limits_of(self.bench.config, self.gpu, self.settings.dtype, prompt, chunk)
        self.bench.prefill(prompt)
        seconds = min(self.bench.prefill(prompt) for _ in range(2))
        return {
            "ms": seconds * 1e3,
            "tok_s": prompt / seconds,
            "of_limit": prompt / seconds / limit.prefill(),
            "kv_gib": self.bench.kv_bytes(1, prompt) / GIB,
        }

    def _mixed(self, point: Point) -> Figures:
        """The limit is the time that the tokens of each kind would take alone, one kind after the other."""
        batch, context, chunk = point.batch, point.tokens, self.settings.chunk_tokens
        gaps, seconds, num_read = self.bench.mixed(batch, context, point.prompt, 2 * self.grid.steps)
        decode = limits_of(self.bench.config, self.gpu, self.settings.dtype, context, chunk).decode(batch)
        prompt_chunk = min(point.prompt, chunk)
        prefill = limits_of(self.bench.config, self.gpu, self.settings.dtype, point.prompt, prompt_chunk).prefill()
        least = (len(gaps) + batch) / decode + num_read * point.prompt / prefill
        return {
            "ms": statistics.median(gaps) * 1e3,
            "p99_ms": percentile(gaps, 99) * 1e3,
            "tok_s": len(gaps) / seconds,
            "prompt_tok_s": num_read * point.prompt / seconds,
            "of_limit": least / seconds,
            "kv_gib": self.bench.kv_bytes(batch, context) / GIB,
        }


def facts(settings: Settings, gpu: Gpu) -> dict[str, str | int | float]:
    """Return the conditions of all figures."""
    return {
        "device": gpu.name,
        "torch": torch.__version__,
        "dtype": settings.dtype,
        "block_tokens": settings.block_tokens,
        "chunk_tokens": settings.chunk_tokens,
        "mixed_tokens": settings.mixed_tokens,
        "bandwidth_gb_s": gpu.bandwidth_tb * 1e3,
        "tflops": gpu.tflops,
    }


def numbers(text: str) -> list[int]:
    """Parse numbers separated by commas."""
    return [int(each) for each in text.split(",") if each]


def read_options() -> argparse.Namespace:
    """Parse the command line, with defaults for this machine."""
    is_cpu = not torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="213M" if is_cpu else "8B")
    parser.add_argument("--tiny", action="store_true", help="the same architecture, a few thousand weights")
    parser.add_argument("--device", default="cpu" if is_cpu else "cuda")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32" if is_cpu else "bfloat16")
    parser.add_argument("--threads", type=int, default=0, help="on a CPU; 0: torch's choice")
    parser.add_argument("--kv-gib", type=float, default=2.0 if is_cpu else 0.0, help="0: what a GPU has left")
    parser.add_argument("--chunk-tokens", type=int, default=512 if is_cpu else 8192)
    for name, values in (
        ("batches", CPU_BATCHES if is_cpu else GPU_BATCHES),
        ("contexts", CPU_CONTEXTS if is_cpu else GPU_CONTEXTS),
        ("prompts", CPU_PROMPTS if is_cpu else GPU_PROMPTS),
        ("mixed", (1, 8) if is_cpu else (8, 32)),
    ):
        parser.add_argument(f"--{name}", type=numbers, default=values)
    parser.add_argument(
        "--weight-format", default="plain", choices=("plain", "packed12"), help="packed12: F12 on a GPU"
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--point-seconds", type=float, default=60.0)
    parser.add_argument("--limit-seconds", type=float, default=3600.0)
    parser.add_argument("--out", type=Path, help="a folder for results.json, results.md and sweep.svg")
    return parser.parse_args()


def main() -> None:
    options = read_options()
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
    shape = SHAPES[options.shape].tiny() if options.tiny else SHAPES[options.shape]
    block_tokens = 16 if options.device == "cpu" else 64
    max_seqs = max([*options.batches, *options.mixed], default=1) + 1
    limits = (block_tokens, options.chunk_tokens, max_seqs, options.kv_gib)
    mixed_tokens = choose_sizes(RequestedSizes(), has_cuda=options.device != "cpu").mixed_tokens  # as a worker would
    is_resident = options.weight_format == "packed12"
    settings = Settings(options.device, options.dtype, *limits, mixed_tokens=mixed_tokens, is_resident=is_resident)
    results = Results.open(options.out / "results.json" if options.out else None, options.limit_seconds)
    gpu = measure(options.device, options.dtype)
    results.under(
        facts(settings, gpu)
        | {"threads": torch.get_num_threads(), "tiny": options.tiny, "weights": options.weight_format}
    )
    parts = (options.batches, options.contexts, options.prompts, options.mixed)
    sweep = Sweep(shape, settings, gpu, Grid(*parts, options.steps, options.point_seconds))
    try:
        sweep.run(results)
    finally:  # report what was measured until then
        sweep.close()
        write_report(results, options.out)


if __name__ == "__main__":
    main()
