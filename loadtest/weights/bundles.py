"""Weft's bundles beside ZipNN on the same files, on one core: size, entropy, encoding and decoding speed.

Each way three times: from memory to fresh memory, which the kernel has to make, and from memory to memory that was used
before, both by the processor's time, the kernel's included; and from file to file, synced, by the clock. Everything is
kept to one core, helping threads too.

`python -m loadtest.weights.bundles [--megabytes 32] [--rounds 5] [--json FILE]`; ZipNN: `pip install zipnn`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import save_file

from loadtest.weights.synthetic import KINDS, tensor
from weft.weights.storage import MemoryBlob, Scratch, map_huge_pages
from weft_bundle import rans
from weft_bundle.chunks import ReadRequest
from weft_bundle.convert import unpack_file
from weft_bundle.pack import pack, pack_file
from weft_bundle.rans.library import native
from weft_bundle.unpack import BundleFile

NANO = Path("models/weft-nano/model.safetensors")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
Times = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Result:
    """Of one file; sizes in percent of the original, speeds in GB of original a second by way: (Weft, ZipNN)."""

    file: str
    megabytes: float
    entropy: float
    weft: float
    zipnn: float
    speeds: dict[str, tuple[float, float]]


class Coder(Protocol):
    """One of the two. What it makes of memory it puts into memory as `_give_memory` says."""

    def encode(self, original: bytes) -> Any: ...
    def decode(self, coded: Any) -> Any: ...
    def encode_file(self, source: Path, target: Path) -> None: ...
    def decode_file(self, source: Path, target: Path) -> None: ...


class Weft:
    """As `weft compress` and the loader do it."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1)
        self.kept: tuple[mmap.mmap, Scratch] | None = None  # memory that is used again

    def encode(self, original: bytes) -> memoryview:
        memory = self.kept[0] if self.kept else map_huge_pages(len(original) + (1 << 20))
        memory.seek(0)
        pack(MemoryBlob("model.safetensors", original), 0, memory, None, lambda size: None)
        return memoryview(memory)[: memory.tell()]

    def decode(self, coded: memoryview) -> memoryview:
        with closing(BundleFile("model.weft", MemoryBlob("model.weft", coded))) as bundle:
            scratch = self.kept[1] if self.kept else Scratch()
            out = scratch.take(bundle.header.original.size_bytes)
            header = bundle.original_header()
            out[: len(header)] = header
            data, done, wanted = np.frombuffer(out, np.uint8), len(header), list[ReadRequest]()
            for each in bundle.header.tensors:
                wanted.append(ReadRequest(each.name, 0, data[done : done + each.original_bytes]))
                done += each.original_bytes
            bundle.read_all(wanted)
            return out

    def encode_file(self, source: Path, target: Path) -> None:
        pack_file(source, target, None, lambda size: None)

    def decode_file(self, source: Path, target: Path) -> None:
        with closing(BundleFile.open(source)) as bundle:
            unpack_file(bundle, target, self._threads, lambda name, size: None)


class ZipNN:
    """Given a copy, made before the clock starts: it reorders its input in place."""

    def __init__(self) -> None:
        try:
            from zipnn import ZipNN
        except ImportError:
            raise SystemExit("the peer is missing: pip install zipnn") from None
        # what it makes is not used again: both ways begin from nothing, as Weft's do
        self._make: Callable[[], Any] = partial(ZipNN, bytearray_dtype="bfloat16", threads=1)

    def encode(self, original: Any) -> Any:
        return self._make().compress(original)

    def decode(self, coded: Any) -> Any:
        return self._make().decompress(coded)

    def encode_file(self, source: Path, target: Path) -> None:
        target.write_bytes(self.encode(bytearray(source.read_bytes())))

    def decode_file(self, source: Path, target: Path) -> None:
        target.write_bytes(self.decode(source.read_bytes()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=32, help="of each synthetic tensor")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    results = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as scratch:
        for path in [NANO, *_synthetic(Path(scratch), options.megabytes)]:
            results.append(measure(path, Path(scratch), options.rounds))
            print(f"{results[-1].file}: done", flush=True)
    print(report(results))
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")


def _synthetic(directory: Path, megabytes: int) -> list[Path]:
    rows = megabytes * 1024 * 1024 // 2 // 4096
    paths = []
    for kind in KINDS:
        values = torch.from_numpy(tensor(kind, rows, 4096).view(np.int16)).view(torch.bfloat16)
        save_file({"weight": values}, path := directory / f"{kind}.safetensors")
        paths.append(path)
    return paths


def measure(path: Path, scratch: Path, rounds: int) -> Result:
    """In turns, so that a busy moment of the machine hits both."""
    raw = path.read_bytes()
    times: dict[str, Times] = {"weft": {}, "zipnn": {}}
    sizes = {}
    for _ in range(rounds):
        for name, coder in (("weft", Weft()), ("zipnn", ZipNN())):
            sizes[name] = 100 * _once(coder, path, scratch, times[name]) / len(raw)
    entropy = rans.entropy_bits(np.frombuffer(raw[len(raw) % 2 :], np.uint16)) / 16
    speeds = {
        way: (_speed(len(raw), times["weft"][way]), _speed(len(raw), times["zipnn"][way])) for way in times["weft"]
    }
    return Result(path.stem, len(raw) / 1e6, 100 * entropy, sizes["weft"], sizes["zipnn"], speeds)


def _once(coder: Coder, path: Path, scratch: Path, times: Times) -> int:
    """Bytes of the coded file. The oracle is equality."""
    raw, coded_file, again = path.read_bytes(), scratch / "coded", scratch / "again"
    original: Any = bytearray(raw)
    cpu, clock = time.process_time, time.perf_counter
    for way in ("fresh", "used"):
        _give_memory(coder, way == "fresh", len(raw))
        if way == "used":
            coder.decode(coder.encode(original))
            original = bytearray(raw)
        coded = _timed(times, f"{way} memory, encode", cpu, partial(coder.encode, original))
        decoded = _timed(times, f"{way} memory, decode", cpu, partial(coder.decode, coded))
        assert bytes(decoded) == raw, "memory did not come back as it was"
        del coded, decoded
        original = bytearray(raw)
    _timed(times, "file, encode", clock, lambda: _synced(coder.encode_file, path, coded_file))
    _timed(times, "file, decode", clock, lambda: _synced(coder.decode_file, coded_file, again))
    assert again.read_bytes() == raw, "a file did not come back as it was"
    return coded_file.stat().st_size


def _give_memory(coder: Coder, is_fresh: bool, size: int) -> None:
    """Fresh: blocks of 128 KiB and more come from the kernel. Else what was given back is given out again."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 128 * 1024 if is_fresh else 1 << 30)
    libc.mallopt(M_TRIM_THRESHOLD, 128 * 1024 if is_fresh else 1 << 30)
    libc.malloc_trim(0)
    if isinstance(coder, Weft):
        coder.kept = None if is_fresh else (map_huge_pages(size + (1 << 20)), Scratch())


def _synced(convert: Callable[[Path, Path], None], source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    convert(source, target)
    with target.open("rb") as file:
        os.fsync(file.fileno())


def _timed(times: Times, way: str, now: Callable[[], float], call: Callable[[], Any]) -> Any:
    start = now()
    result = call()
    times.setdefault(way, []).append(now() - start)
    return result


def _speed(num_bytes: int, seconds: list[float]) -> float:
    return num_bytes / 1e9 / statistics.median(seconds)


def report(results: list[Result]) -> str:
    """Two tables: percent of the original, and GB a second with the ratio of the two."""
    lines = ["| file | MB | entropy | Weft | ZipNN | less by |", "|---|---|---|---|---|---|"]
    for r in results:
        shares = f"{r.entropy:.2f} % | {r.weft:.2f} % | {r.zipnn:.2f} % | {r.zipnn - r.weft:.2f}"
        lines.append(f"| {r.file} | {r.megabytes:.1f} | {shares} |")
    ways = list(results[0].speeds)
    lines += ["", f"| GB/s, Weft : ZipNN | {' | '.join(ways)} |", "|---|" + "---|" * len(ways)]
    for r in results:
        pairs = (f"{ours:.2f} : {theirs:.2f} = {ours / theirs:.1f}x" for ours, theirs in r.speeds.values())
        lines.append(f"| {r.file} | {' | '.join(pairs)} |")
    whole = sum(r.weft * r.megabytes for r in results) / sum(r.megabytes for r in results)
    return "\n".join([*lines, f"\nall files together: {whole:.2f} %; native code: {native() is not None}"])


if __name__ == "__main__":
    main()
