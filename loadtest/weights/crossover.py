"""From how fast a disk on a bundle no longer loads faster than its checkpoint: both from disks of several speeds.

`python -m loadtest.weights.crossover [--gigabytes 1] [--rates 0.25,0.5] [--rounds 5] [--directory DIR] [--huge-pages]`
as root: the machine's own disk is slowed down by Linux, for this process alone. The page cache is dropped before every
load. Decoding's own speed is measured in the same run, from files in memory.

Told is the best of the rounds, whose order is drawn by lot: the host of a virtual machine may take back what is free,
and who then gets new memory waits for the host to give it again, at some GB a second. So memory is touched before every
load, and still some of it may be gone by then.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from loadtest.weights.checkpoints import make_checkpoint
from loadtest.weights.loader import begin_in_large_pages, drop_cache, ours, raw, touch_memory
from loadtest.weights.slow_disk import NoThrottle, slow_disk
from weft.weights.bundle import convert
from weft.weights.checkpoint import read_checkpoint
from weft.weights.image import SHARED_MEMORY

RATES = "0.25,0.5,1.0,1.5,2.0,3.0"


@dataclass(frozen=True, slots=True)
class Speed:
    """GB of weights a second from a disk that gives `disk` GB a second: read and dropped, loaded, from a bundle."""

    disk: float
    alone: float
    plain: float
    bundle: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--rates", default=RATES, help="GB a second, by commas")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="on the disk to be slowed down")
    parser.add_argument("--huge-pages", action="store_true", help="/dev/shm in large pages, for this run only")
    options = parser.parse_args()
    if options.huge_pages:
        begin_in_large_pages("loadtest.weights.crossover")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
        model, bundle = Path(scratch) / "model", Path(scratch) / "bundle"
        make_checkpoint(model, options.gigabytes)
        convert.compress(model, bundle, len(os.sched_getaffinity(0)), lambda name, size: None)
        decoder = in_memory(bundle, read_checkpoint(model).total_bytes, options)
        try:
            speeds = [at(float(rate), model, bundle, options) for rate in options.rates.split(",")]
        except NoThrottle as error:
            sys.exit(f"no disk can be slowed down here: {error}")
    print(report(speeds, decoder))


def in_memory(bundle: Path, size: int, options: argparse.Namespace) -> float:
    """What decoding gives where nothing has to be waited for."""
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as memory_disk:
        copy = Path(memory_disk) / "model"
        subprocess.run(["cp", "-r", bundle, copy], check=True)
        return size / 1e9 / min(ours(copy, options.threads) for _ in range(options.rounds))


def at(rate: float, model: Path, bundle: Path, options: argparse.Namespace) -> Speed:
    """In turns."""
    size = read_checkpoint(model).total_bytes / 1e9
    ways: list[Callable[[], float]] = [
        lambda: raw(model, options.threads, False),
        lambda: ours(model, options.threads),
        lambda: ours(bundle, options.threads),
    ]
    best = [math.inf for _ in ways]
    with slow_disk(options.directory, int(rate * 1e9)):
        for _ in range(options.rounds):
            for place in random.sample(range(len(ways)), len(ways)):
                drop_cache(model)
                drop_cache(bundle)
                touch_memory(read_checkpoint(model).total_bytes)
                best[place] = min(best[place], ways[place]())
    speed = Speed(rate, *(size / seconds for seconds in best))
    print(
        f"{rate:.2f} GB/s: the disk {speed.alone:.2f}, Weft {speed.plain:.2f}, from a bundle {speed.bundle:.2f}",
        flush=True,
    )
    return speed


def report(speeds: list[Speed], decoder: float) -> str:
    """A table, and whether the bundle is faster wherever the disk is slower than the decoder."""
    lines = [
        "| disk, GB/s | read and dropped | Weft | Weft, from a bundle | bundle : checkpoint |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {s.disk:.2f} | {s.alone:.2f} | {s.plain:.2f} | {s.bundle:.2f} | {s.bundle / s.plain:.2f} |" for s in speeds
    ]
    slower = [s for s in speeds if s.alone < decoder]
    outcome = "met" if slower and all(s.bundle > s.plain for s in slower) else "MISSED"
    lines.append(
        f"\nDecoding alone gives {decoder:.2f} GB/s; from disks slower than that the bundle is faster: {outcome}"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
