"""How long the device is idle in a decode step.

On a GPU: the gaps between its kernels, as its profiler times them. On a CPU: the time in which the threads' cores did
something else.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

# share of the traced time that is left out at either end: the first steps warm up, the last ones run dry
LEFT_OUT = 0.25


@dataclass(frozen=True)
class Idle:
    """Seconds of a step; None, with a reason, when the profiler saw nothing."""

    seconds: float | None
    reason: str = ""


def measure_idle(device: str, decode: Callable[[], list[float]]) -> Idle:
    """Measure equal steps; `decode` runs them and returns the seconds of each."""
    return _cpu_idle(decode) if device == "cpu" else _gpu_idle(decode)


def idle_share(intervals: list[tuple[float, float]]) -> float:
    """Return the share of the time between the edges that is in no interval."""
    begin, end = min(start for start, _ in intervals), max(stop for _, stop in intervals)
    first, last = begin + LEFT_OUT * (end - begin), end - LEFT_OUT * (end - begin)
    idle, reached = 0.0, first
    for start, stop in [*sorted(intervals), (last, last)]:
        idle += max(0.0, min(start, last) - reached)
        reached = max(reached, min(stop, last))
    return idle / (last - first)


def _cpu_idle(decode: Callable[[], list[float]]) -> Idle:
    """Attribute idle time to the steps by their share of the time of `decode`."""
    wall, work = time.perf_counter(), time.process_time()
    steps = decode()
    wall, work = time.perf_counter() - wall, time.process_time() - work
    share = max(0.0, 1 - work / wall / torch.get_num_threads())
    return Idle(share * sum(steps) / len(steps))


def _gpu_idle(decode: Callable[[], list[float]]) -> Idle:
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        steps = decode()
        torch.cuda.synchronize()
    kernels = [
        (event.time_range.start, event.time_range.end) for event in profile.events() if event.device_type.name == "CUDA"
    ]
    if not any(end > start for start, end in kernels):
        return Idle(None, "the profiler saw no kernels")
    typical = sorted(steps)[len(steps) // 2]
    return Idle(idle_share(kernels) * typical)
