"""Decode attention alone against the measured bandwidth, on a GPU or a CPU, by the engine's own call.

    python -m loadtest.engine.attention --threads 1,2

Every call reads another layer of the pool, so that no cache holds its data.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass

import torch

from loadtest.engine.limits import measure, seconds
from weft.capacity.layout import Gpu
from weft.capacity.plan import TERA
from weft_kernels.layer_cache import uniform_pool
from weft_kernels.paged_attention import PagedBatch, paged_attention

NUM_LAYERS = 4
MAX_POOL_BYTES = 16 << 30
GPU_POINTS = [(1, 1024), (8, 1024), (32, 1024), (128, 1024), (256, 1024), (1, 32768), (8, 32768), (32, 8192)]
CPU_POINTS = [(1, 128), (1, 1024), (1, 8192), (1, 32768), (8, 1024), (32, 1024), (32, 128)]


@dataclass(frozen=True)
class Heads:
    """Heads of one GPU's share of a model."""

    name: str
    num_heads: int
    kv_heads: int
    dim: int
    block_tokens: int


GPU_HEADS = [Heads("8B", 32, 8, 128, 64), Heads("70B / TP8", 8, 1, 128, 64)]
CPU_HEADS = [Heads("213M", 16, 4, 64, 16), Heads("one key head", 8, 1, 64, 16)]
TINY_HEADS = [Heads("tiny", 4, 2, 16, 16)]
TINY_POINTS = [(1, 128), (4, 1100)]


@dataclass(frozen=True)
class Row:
    """One measured point. `of_limit`: bytes of keys and values read a second, over the measured bandwidth."""

    heads: str
    batch: int
    context: int
    us: float
    gb_s: float
    of_limit: float
    note: str = ""


def attend(heads: Heads, batch: int, context: int, device: str, gpu: Gpu) -> Row:
    """Measure sequences of one length with shuffled blocks."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    per_sequence = -(-context // heads.block_tokens)
    shape = (batch * per_sequence, heads.kv_heads, NUM_LAYERS, 2, heads.block_tokens, heads.dim)
    size = torch.Size(shape).numel() * dtype.itemsize
    if size > min(MAX_POOL_BYTES, int(gpu.memory_gib * 2**30) // 4):
        return Row(heads.name, batch, context, 0, 0, 0, f"not run: a pool of {size / 2**30:.1f} GiB")
    pool = torch.randn(shape, device=device, dtype=dtype)
    tables = torch.randperm(len(pool)).view(batch, per_sequence).tolist()
    packed = PagedBatch(uniform_pool(pool), heads.num_heads, range(batch + 1), [context] * batch, tables)
    q = torch.randn(batch, heads.num_heads, heads.dim, device=device, dtype=dtype)

    def all_layers() -> None:
        for layer in range(NUM_LAYERS):
            paged_attention(q, layer, packed)

    took = statistics.median(seconds(all_layers, device)) / NUM_LAYERS
    read = 2 * batch * context * heads.kv_heads * heads.dim * dtype.itemsize
    return Row(heads.name, batch, context, took * 1e6, read / took / 1e9, read / took / (gpu.bandwidth_tb * TERA))


def sweep_attention(device: str, gpu: Gpu, is_tiny: bool) -> list[Row]:
    """Measure all points for the kind of device."""
    all_heads, points = (CPU_HEADS, CPU_POINTS) if device == "cpu" else (GPU_HEADS, GPU_POINTS)
    if is_tiny:
        all_heads, points = TINY_HEADS, TINY_POINTS
    return [attend(heads, batch, context, device, gpu) for heads in all_heads for batch, context in points]


def main() -> None:
    """Print a table for each number of threads on a CPU, or one for a GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", default="1,2")
    options = parser.parse_args()
    for threads in map(int, options.threads.split(",") if options.device == "cpu" else "1"):
        torch.set_num_threads(threads)
        gpu = measure(options.device)
        print(f"{gpu.name}: {gpu.bandwidth_tb * 1e3:,.1f} GB/s measured")
        for row in sweep_attention(options.device, gpu, is_tiny=False):
            figures = row.note or f"{row.us:12,.1f} us {row.gb_s:10,.1f} GB/s {row.of_limit:7.0%}"
            print(f"{row.heads:14} {row.batch:4} x {row.context:6} {figures}")


if __name__ == "__main__":
    main()
