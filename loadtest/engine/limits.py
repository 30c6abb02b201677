"""The device's limits, measured in the same run as everything that is compared with them.

Bandwidth: the faster of reading and of copying a buffer that no cache holds. Operations: one large matrix product.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from weft.capacity.footprint import footprint
from weft.capacity.layout import GIB, Demand, Gpu
from weft.capacity.plan import TERA, Roofline, make_plan
from weft.engine.executor import DTYPES
from weft.model.sharding import Layout
from weft.model.spec import ModelConfig

CPU_BYTES, GPU_BYTES = 256 << 20, 1 << 30
CPU_SIZE, GPU_SIZE = 1536, 8192


def seconds(call: Callable[[], object], device: str, repeats: int = 7) -> list[float]:
    """Return the seconds of each call, after two to warm up."""
    times = []
    for index in range(repeats + 2):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        if index >= 2:
            times.append(time.perf_counter() - start)
    return times


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def read_bandwidth(device: str) -> float:
    """Return the bytes a second of summing a buffer that no cache holds; the best of several times."""
    source = torch.zeros((CPU_BYTES if device == "cpu" else GPU_BYTES) // 4, device=device)
    return source.nbytes / min(seconds(source.sum, device))


def measure(device: str, of_products: str | None = None) -> Gpu:
    """Return the device for the planner. Products are float32 on a CPU, bfloat16 on a GPU, unless given."""
    is_cpu = device == "cpu"
    dtype = DTYPES[of_products or ("float32" if is_cpu else "bfloat16")]
    size = CPU_SIZE if is_cpu else GPU_SIZE
    source = torch.zeros((CPU_BYTES if is_cpu else GPU_BYTES) // dtype.itemsize, dtype=dtype, device=device)
    target = torch.empty_like(source)
    # the best call: a limit is what the device can do without other load
    copying = min(seconds(lambda: target.copy_(source), device))
    bandwidth = max(read_bandwidth(device), 2 * source.nbytes / copying)
    left, right = torch.randn(2, size, size, device=device).to(dtype)
    rate = 2 * size**3 / min(seconds(lambda: left @ right, device)) / TERA
    if is_cpu:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Gpu(f"CPU, {torch.get_num_threads()} threads", memory / GIB, bandwidth / TERA, rate, rate)
    memory = torch.cuda.mem_get_info(device)[1]
    return Gpu(torch.cuda.get_device_name(device), memory / GIB, bandwidth / TERA, rate, rate)


def limits_of(config: ModelConfig, gpu: Gpu, dtype: str, context: int, chunk_tokens: int) -> Roofline:
    """Return the planner's rooflines on measured rates. A CPU reads weights in the dtype in which they are stored."""
    plan = make_plan(config, Layout(), Demand(gpu, 1, context, dtype, chunk_tokens))
    return replace(plan.roofline, weights=footprint(config))
