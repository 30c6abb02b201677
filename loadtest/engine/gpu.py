"""The engine on a bare GPU machine, from a checkout, in ten minutes: torch and triton are enough.

    PYTHONPATH=libs:kernels:. python -m loadtest.engine.gpu --out results
    PYTHONPATH=libs:kernels:. python -m loadtest.engine.gpu --out tiny --tiny     the same on any machine, in seconds
    PYTHONPATH=libs:kernels:. python -m loadtest.engine.gpu --out packed --weight-format packed12   limits of plain

Measures the device's own limits, attention alone, then decode, prefill and mixed load of the 8B, 70B, Scout and Kimi
shapes, and transformers beside it where it is installed. After every point everything is in results/: results.json,
results.md; `python -m loadtest.engine.results results` draws sweep.svg. A second run continues the first one.
"""

from __future__ import annotations

import argparse
import gc
import time
import traceback
from dataclasses import asdict, replace
from pathlib import Path

import torch

from loadtest.engine.attention import sweep_attention
from loadtest.engine.drive import Settings
from loadtest.engine.hf_peers import run_peers
from loadtest.engine.limits import measure
from loadtest.engine.results import Results, write_report
from loadtest.engine.shapes import SHAPES, Shape, weight_bytes
from loadtest.engine.sweep import GPU_BATCHES, GPU_CONTEXTS, GPU_PROMPTS, Grid, ShapeFailed, Sweep, facts
from weft.capacity.layout import GIB, Gpu
from weft.capacity.sizes import RequestedSizes, choose_sizes

FULL = Grid(GPU_BATCHES, GPU_CONTEXTS, GPU_PROMPTS, (8, 32), 24, 30.0)
# layers of larger models: where bandwidth and arithmetic meet, not every corner
PART = Grid((1, 32, 128, 256), (1024, 8192), (2048, 8192), (32,), 24, 20.0)
# what the bars need, in a minute
QUICK = Grid(GPU_BATCHES, (1024,), (2048, 8192), (32,), 40, 10.0)
TINY = Grid((1, 4), (128, 1024), (300,), (2,), 6, 10.0)


def settings_for(device: str, is_tiny: bool) -> Settings:
    """Return the settings of a worker with defaults; a tiny model gets little KV."""
    sizes = choose_sizes(RequestedSizes(), has_cuda=device != "cpu")
    machine, limits = sizes.machine, (sizes.chunk_tokens, sizes.max_seqs)
    kv_gib = 0.05 if is_tiny else 0.0
    return Settings(device, machine.dtype, machine.block_tokens, *limits, kv_gib, mixed_tokens=sizes.mixed_tokens)


def run_shape(shape: Shape, settings: Settings, gpu: Gpu, grid: Grid, results: Results) -> None:
    """Measure all points of a shape with one engine; a shape that fails gets a note, and the others continue."""
    needed = weight_bytes(shape.config()) / GIB
    title = f"{shape.title}: {needed:.1f} GiB of weights"
    if needed > 0.85 * gpu.memory_gib:
        results.facts[shape.name] = f"{title}, more than this device has"
        return
    if all(results.has(point) for point in grid.points(shape.name)):
        return
    free()
    started = time.monotonic()
    try:
        sweep = Sweep(shape, settings, gpu, grid)
    except Exception as error:  # out of memory, or a kernel that this device does not take
        traceback.print_exc()
        results.facts[shape.name] = f"{title}; {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return
    results.facts[shape.name] = f"{title}, ready in {time.monotonic() - started:.1f} s"
    try:
        sweep.run(results)
    except ShapeFailed as error:
        traceback.print_exc()
        results.facts[shape.name] += f"; ended at {error}"
    finally:
        sweep.close()
        results.save()
        del sweep
        free()


def free() -> None:
    """Release the last engine's memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="", help="default: a GPU; of tiny models the CPU where there is none")
    parser.add_argument("--shapes", default="8B,Kimi,Scout,70B")
    parser.add_argument("--weight-format", default="plain", choices=("plain", "packed12"))
    parser.add_argument("--limit-seconds", type=float, default=560.0)
    parser.add_argument("--tiny", action="store_true", help="tiny models of the same architectures")
    parser.add_argument("--quick", action="store_true", help="one context, two prompts")
    options = parser.parse_args()
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu" if options.tiny else "")
    if not options.device:
        parser.error("no GPU here: --tiny is for any machine, --device cpu for one with all that memory")
    options.out.mkdir(parents=True, exist_ok=True)
    results = Results.open(options.out / "results.json", options.limit_seconds)
    settings = replace(settings_for(options.device, options.tiny), is_resident=options.weight_format == "packed12")
    gpu = measure(options.device)
    results.under(facts(settings, gpu) | {"weights": options.weight_format, "tiny": options.tiny})
    if not results.attention:
        results.attention = [asdict(row) for row in sweep_attention(options.device, gpu, options.tiny)]
        results.save()
        free()
    for index, name in enumerate(options.shapes.split(",")):
        shape = SHAPES[name].tiny() if options.tiny else SHAPES[name]
        grid = TINY if options.tiny else QUICK if options.quick else FULL if index == 0 else PART
        run_shape(shape, settings, gpu, grid, results)
        write_report(results, options.out)
        if index == 0:
            run_peers(shape, settings, grid, results)
            free()
    write_report(results, options.out)


if __name__ == "__main__":
    main()
