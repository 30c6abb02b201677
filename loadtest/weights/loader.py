"""How fast a checkpoint comes into shared memory, beside what its disk gives and what other loaders take, in one run.

`python -m loadtest.weights.loader [--gigabytes 1] [--threads 8] [--peers PYTHON] [--directory DIR] [--huge-pages]`,
`[--hold-memory]`

The page cache is dropped before every load, file by file. `--peers` names the Python of another environment, with
torch and any of safetensors, fastsafetensors and runai-model-streamer. `--huge-pages` (root): with a /dev/shm of the
run's own whose pages are large, as `mount -o remount,huge=within_size /dev/shm` makes a machine's. The checkpoint is
made for the run and removed; that takes 1.7 times its size on disk and at most twice its size of memory. Memory is
touched before every load: the host of a virtual machine may have taken back what is free, and be slow to give it again.
What it takes back within a second is still slow: with `--hold-memory` a load gets memory that was in use a moment ago,
which takes all that is free, and a /dev/shm that is as large as memory.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from loadtest.weights.checkpoints import make_checkpoint
from loadtest.weights.memory_hog import HeldMemory, can_hold
from weft.weights.checkpoint import read_checkpoint
from weft.weights.formats import PIECE_BYTES, ReadBuffers
from weft.weights.image import SHARED_MEMORY, write_image
from weft.weights.load import write_all
from weft.weights.storage import FileBlob
from weft_bundle import convert

PEERS = Path(__file__).with_name("peers.py")
PEER_SECONDS = 600
SAMPLE_SECONDS = 0.01
TOUCHED_BYTES = 4 << 20
IN_LARGE_PAGES = 'mount -t tmpfs -o huge=within_size,size=200% weft /dev/shm && exec "$0" "$@"'


@dataclass(frozen=True, slots=True)
class Rate:
    """Of one way to load: GB of weights a second, the median and the best of the rounds."""

    what: str
    median: float
    best: float
    extra_mb: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=Path.cwd(), help="on the disk to be measured")
    parser.add_argument("--peers", type=Path, help="Python of an environment with the peers")
    parser.add_argument("--huge-pages", action="store_true", help="/dev/shm in large pages, for this run only")
    parser.add_argument("--hold-memory", action="store_true", help="take what is free, and give it as it is asked for")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.huge_pages:
        begin_in_large_pages("loadtest.weights.loader")
    if options.hold_memory and not can_hold():
        parser.error(f"--hold-memory: {SHARED_MEMORY} is smaller than memory; with --huge-pages it is not")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # nothing of this size may stay
    with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
        model, bundle = Path(scratch) / "model", Path(scratch) / "bundle"
        make_checkpoint(model, options.gigabytes)
        convert.compress(model, bundle, len(os.sched_getaffinity(0)), lambda name, size: None)
        rates = measure(model, bundle, options)
    print(report(rates))
    if options.json:
        options.json.write_text(json.dumps([asdict(rate) for rate in rates], indent=2) + "\n")


def begin_in_large_pages(module: str) -> NoReturn:
    """The same program anew, with a /dev/shm of its own, and without the option that asked for it."""
    rest = [each for each in sys.argv[1:] if not each.startswith("--hu")]  # argparse takes it cut short as well
    again = [sys.executable, "-m", module, *rest]
    os.execvp("unshare", ["unshare", "--mount", "sh", "-c", IN_LARGE_PAGES, *again])


def measure(model: Path, bundle: Path, options: argparse.Namespace) -> list[Rate]:
    """In turns, whose order is drawn by lot, so that a busy moment of the machine hits all alike."""
    ways: dict[str, Callable[[], float | None]] = {
        "the disk alone: direct reads into memory used again": lambda: raw(model, options.threads, False),
        "the same, kept: written to new shared memory": lambda: raw(model, options.threads, True),
        "Weft": lambda: ours(model, options.threads),
        "Weft, from a bundle": lambda: ours(bundle, options.threads),
    }
    for peer in ("safetensors", "fastsafetensors", "runai_model_streamer") if options.peers else ():
        ways[peer] = partial(other, options.peers, peer, model, options.threads)
    size = read_checkpoint(model).total_bytes
    seconds: dict[str, list[float]] = {what: [] for what in ways}
    extra: dict[str, int] = {}
    for number in range(options.rounds):
        for what in random.sample(list(ways), len(ways)):
            drop_cache(model)
            drop_cache(bundle)
            with ready_memory(size, options.hold_memory), PeakMemory() as memory:
                took = ways[what]()
            if took is None:
                continue  # it failed, and was not slow
            seconds[what].append(took)
            if number:  # the first round also pays for libraries that are loaded
                extra[what] = max(extra.get(what, 0), memory.extra_bytes)
            print(f"{what}: {size / 1e9 / took:.2f} GB/s", flush=True)
    for what, directory in (("Weft, files in memory", model), ("Weft, bundle in memory", bundle)):
        with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as memory_disk:
            copy = Path(memory_disk) / "model"
            subprocess.run(["cp", "-r", directory, copy], check=True)
            seconds[what] = []
            for _ in range(options.rounds):
                with ready_memory(size, options.hold_memory):
                    seconds[what].append(ours(copy, options.threads))
    return [
        Rate(what, size / 1e9 / statistics.median(times), size / 1e9 / min(times), extra.get(what, 0) / 1e6)
        for what, times in seconds.items()
        if times
    ]


def drop_cache(directory: Path) -> None:
    """Of every file there."""
    for path in directory.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def ready_memory(size_bytes: int, is_held: bool) -> AbstractContextManager[object]:
    """Within it a load of this size finds memory."""
    if is_held:
        return HeldMemory()
    touch_memory(size_bytes)
    return nullcontext()


def touch_memory(size_bytes: int) -> None:
    """Take so much, and give it back."""
    block = bytes(TOUCHED_BYTES)
    with tempfile.TemporaryFile(dir=SHARED_MEMORY) as file:
        os.ftruncate(file.fileno(), size_bytes)
        for offset in range(0, size_bytes, TOUCHED_BYTES):
            os.pwrite(file.fileno(), block[: size_bytes - offset], offset)


def ours(directory: Path, num_threads: int) -> float:
    """Seconds from the directory's name to an image that can be mapped."""
    began = time.perf_counter()
    image = write_image(read_checkpoint(directory), lambda size, file: None, num_threads)
    seconds = time.perf_counter() - began
    image.release()
    return seconds


def raw(directory: Path, num_threads: int, is_kept: bool) -> float:
    """Seconds for all bytes, read as the loader reads them and not looked at."""
    blobs = [FileBlob(path) for path in sorted(directory.glob("*.safetensors"))]
    plan = [(blob, offset) for blob in blobs for offset in range(0, blob.size_bytes, PIECE_BYTES)]
    local = threading.local()
    with tempfile.TemporaryFile(dir=SHARED_MEMORY) as kept, ThreadPoolExecutor(num_threads) as threads:
        if is_kept:  # of its whole size from the start, as an image is: else there would be no large pages
            os.ftruncate(kept.fileno(), len(plan) * PIECE_BYTES)

        def read(number: int) -> None:
            if not hasattr(local, "memory"):
                local.memory = ReadBuffers()
            blob, offset = plan[number]
            data = blob.read(offset, min(PIECE_BYTES, blob.size_bytes - offset), local.memory.stored)
            if is_kept:
                write_all(kept.fileno(), data, number * PIECE_BYTES)

        began = time.perf_counter()
        list(threads.map(read, range(len(plan))))
        seconds = time.perf_counter() - began
    for blob in blobs:
        blob.close()
    return seconds


def other(python: Path, peer: str, directory: Path, num_threads: int) -> float | None:
    """Seconds that a peer says it took, imports not counted; None where it did not load."""
    command = [str(python), str(PEERS), peer, str(directory), str(num_threads)]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=PEER_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        print(f"{peer} has not loaded after {PEER_SECONDS:.0f} s")
        return None
    if ended.returncode:
        print(f"{peer} does not run here: {ended.stderr.strip().rpartition(chr(10))[2]}")
        return None
    return float(ended.stdout.split()[-1])


class PeakMemory:
    """How much more memory of its own this process has held at once, shared memory not counted."""

    def __init__(self) -> None:
        self.extra_bytes = 0
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        self._before = anonymous_bytes()
        self._watch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._watch.join()

    def _look(self) -> None:
        while not self._over.wait(SAMPLE_SECONDS):
            self.extra_bytes = max(self.extra_bytes, anonymous_bytes() - self._before)


def anonymous_bytes() -> int:
    """Memory of this process that is nobody else's and no file's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def report(rates: list[Rate]) -> str:
    """A table, and where a bundle begins to pay."""
    lines = ["| loading | GB/s, median | best | of the disk alone | memory beside it, MB |", "|---|---|---|---|---|"]
    for r in rates:
        share = f"{100 * r.median / rates[0].median:.0f} %"
        lines.append(
            f"| {r.what} | {r.median:.2f} | {r.best:.2f} | {share} | {f'{r.extra_mb:.0f}' if r.extra_mb else ''} |"
        )
    of = {rate.what: rate.median for rate in rates}
    crossover = (
        "\nDerived, were reading hidden wholly behind decoding: a bundle loads faster than its checkpoint from disks "
        f"below {of['Weft, bundle in memory']:.2f} GB/s, what decoding gives on {len(os.sched_getaffinity(0))} cores; "
        f"beyond {of['Weft, files in memory']:.2f} GB/s a disk would wait for copying."
    )
    return "\n".join([*lines, crossover])


if __name__ == "__main__":
    main()
