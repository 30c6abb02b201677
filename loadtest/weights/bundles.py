"""Weft's bundles beside ZipNN on the same files, one thread each: size, entropy, encoding and decoding speed.

Weft goes from file to file, synced by neither; ZipNN works in memory.

`python -m loadtest.weights.bundles [--megabytes 32] [--rounds 5] [--json FILE]`; ZipNN: `pip install zipnn`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from loadtest.weights.synthetic import KINDS, tensor
from weft.weights.bundle.pack import pack_file
from weft.weights.bundle.unpack import BundleFile
from weft_kernels import rans
from weft_kernels.native import native

NANO = Path("models/weft-nano/model.safetensors")


@dataclass(frozen=True, slots=True)
class Result:
    """Of one file; sizes in percent of the original, speeds in GB of original a second."""

    file: str
    megabytes: float
    entropy: float
    weft: float
    zipnn: float
    weft_encode: float
    zipnn_encode: float
    weft_decode: float
    zipnn_decode: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=32, help="of each synthetic tensor")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    with tempfile.TemporaryDirectory() as scratch:
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
    """Encode and decode in turns, so that a busy moment of the machine hits both. The oracle is equality."""
    raw = path.read_bytes()
    target = scratch / f"{path.stem}.weft"
    zipped = b""
    times: dict[str, list[float]] = {
        name: [] for name in ("weft_encode", "weft_decode", "zipnn_encode", "zipnn_decode")
    }
    with ThreadPoolExecutor(1) as threads:
        for _ in range(rounds):
            seconds, _ = _timed(partial(pack_file, path, target, threads, lambda size: None))
            times["weft_encode"].append(seconds)
            seconds, unpacked = _timed(partial(_unpack, target))
            times["weft_decode"].append(seconds)
            assert unpacked.tobytes() == raw, "a bundle did not give back its file"
            # a copy, made before the clock starts: ZipNN reorders its input in place
            seconds, zipped = _timed(partial(_zipnn().compress, bytearray(raw)))
            times["zipnn_encode"].append(seconds)
            seconds, unzipped = _timed(partial(_zipnn().decompress, zipped))
            times["zipnn_decode"].append(seconds)
            assert bytes(unzipped) == raw, "ZipNN did not give back its file"
    speeds = {name: len(raw) / 1e9 / statistics.median(seconds) for name, seconds in times.items()}
    entropy = rans.entropy_bits(np.frombuffer(raw[len(raw) % 2 :], np.uint16)) / 16
    sizes = {"weft": 100 * target.stat().st_size / len(raw), "zipnn": 100 * len(zipped) / len(raw)}
    return Result(path.stem, len(raw) / 1e6, 100 * entropy, **sizes, **speeds)


def _unpack(path: Path) -> NDArray[np.uint8]:
    with BundleFile.map(path) as bundle:
        header = bundle.original_header()
        out = np.empty(bundle.header.original.size_bytes, np.uint8)
        out[: len(header)] = np.frombuffer(header, np.uint8)
        at = len(header)
        for each in bundle.header.tensors:
            bundle.read_into(each.name, 0, out[at : at + each.original_bytes])
            at += each.original_bytes
        return out


def _zipnn() -> Any:
    try:
        from zipnn import ZipNN
    except ImportError:
        raise SystemExit("the peer is missing: pip install zipnn") from None
    return ZipNN(bytearray_dtype="bfloat16", threads=1)


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def report(results: list[Result]) -> str:
    """A table: percent of the original, GB a second, and the ratio of the two."""
    lines = [
        "| file | MB | entropy | Weft | ZipNN | less by | encode GB/s Weft : ZipNN | decode GB/s Weft : ZipNN |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        lines.append(
            f"| {r.file} | {r.megabytes:.1f} | {r.entropy:.2f} % | {r.weft:.2f} % | {r.zipnn:.2f} % "
            f"| {r.zipnn - r.weft:.2f} "
            f"| {r.weft_encode:.2f} : {r.zipnn_encode:.2f} = {r.weft_encode / r.zipnn_encode:.1f}x "
            f"| {r.weft_decode:.2f} : {r.zipnn_decode:.2f} = {r.weft_decode / r.zipnn_decode:.1f}x |"
        )
    whole = sum(r.weft * r.megabytes for r in results) / sum(r.megabytes for r in results)
    return "\n".join([*lines, f"\nall files together: {whole:.2f} %; native code: {native() is not None}"])


if __name__ == "__main__":
    main()
