"""Compiles the C++ kernels into one shared library for each instruction set, cached by what goes into it.

Knows compilers and files; knows nothing of what the kernels compute.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)
ROOT = Path(__file__).parents[1]
SOURCES = (
    "dense_layers/dense_layers.cpp",
    "kv_write/kv_write.cpp",
    "linear/linear.cpp",
    "linear/matrix_unit.cpp",
    "linear/pack.cpp",
    "linear/twelve.cpp",
    "native/threads.cpp",
    "paged_attention/chunks.cpp",
    "paged_attention/rows.cpp",
    "rans/choose.cpp",
    "rans/decode.cpp",
    "rans/encode.cpp",
    "rans/tables.cpp",
    "rms_norm/rms_norm.cpp",
    "rope/rope.cpp",
    "rope_kv/rope_kv.cpp",
    "silu_mul/silu_mul.cpp",
)
HEADERS = (
    "linear/linear.h",
    "linear/panels.h",
    "linear/results.h",
    "linear/slices.h",
    "linear/tiles.h",
    "linear/twelve.h",
    "linear/twelve_tiles.h",
    "native/tiles.h",
    "native/vector.h",
    "paged_attention/chunks.h",
    "paged_attention/matrix_chunks.h",
    "paged_attention/products.h",
    "paged_attention/rows.h",
    "rans/bytes.h",
    "rans/coder.h",
    "rans/format.h",
    "rans/lanes.h",
    "rans/loudness.h",
    "rans/permute.h",
    "rans/permute_coding.h",
    "rans/shuffle.h",
    "rans/stream.h",
    "rms_norm/rms_norm.h",
    "rope/rotate.h",
    "rope_kv/rope_kv.h",
    "silu_mul/silu_mul.h",
)
COMMON = ("-std=c++17", "-O3", "-shared", "-fPIC", "-fvisibility=hidden", "-x", "c++")
AVX512 = ("-DWEFT_WIDTH=16", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma")
AMX = ("-mavx512bf16", "-mamx-tile", "-mamx-bf16")
# A processor that can run one can run those before it.
FLAGS = {
    "avx2": ("-DWEFT_WIDTH=8", "-mavx2", "-mfma"),
    "avx512": AVX512,
    "avx512_bf16": (*AVX512, "-mavx512bf16"),
    "amx": (*AVX512, *AMX),
}
NEW = AMX
# What a compiler may lack; without OpenMP kernels run on one thread, else they share torch's own ones.
MISSING = ((), NEW, ("-fopenmp",), (*NEW, "-fopenmp"))
BUILD_SECONDS = 120


class BuildFailed(Exception):
    """There is no compiler, or it did not take the sources."""


def cached_library(isa: str) -> Path:
    """The library of `isa`, built unless it lies in the cache. Raises BuildFailed, OSError."""
    path = path_of(isa)
    if path.exists():
        return path
    # all may read and none may write: an image builds them as root for a user of its own
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    with open(path.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # many workers may start at once; the first one builds
        if not path.exists():
            _build(isa, path)
    return path


def path_of(isa: str) -> Path:
    """Where the library of `isa` lies, once it is built."""
    return cache_dir() / f"weft-{isa}-{_digest(isa)}.so"


def cache_dir() -> Path:
    """Where built libraries are kept: with the user, or where an image has them ($WEFT_KERNEL_CACHE)."""
    if chosen := os.environ.get("WEFT_KERNEL_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft" / "native"


def is_supported_machine() -> bool:
    """Is there a build for this kind of processor at all?"""
    return platform.machine().lower() in ("x86_64", "amd64") and sys.platform == "linux"


def is_from_intel() -> bool:
    """Has Intel made the processor? Where nothing says so, no."""
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


@cache
def _digest(isa: str) -> str:
    """Of all that it is made from: half a hundred files, which forked workers need not read again."""
    digest = hashlib.blake2b(repr((COMMON, FLAGS[isa], SOURCES)).encode(), digest_size=10)
    for name in (*SOURCES, *HEADERS):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def _build(isa: str, path: Path) -> None:
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++"))), None)
    if compiler is None:
        raise BuildFailed("no C++ compiler found (c++, g++, clang++ or $CXX)")
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        made = Path(scratch) / path.name
        sources = (str(ROOT / name) for name in SOURCES)
        command = [compiler, *COMMON, *FLAGS[isa], "-fopenmp", "-o", str(made), *sources]
        refused = ""
        for attempt in dict.fromkeys(tuple(part for part in command if part not in missing) for missing in MISSING):
            done = subprocess.run(attempt, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
            if done.returncode == 0:
                if refused:
                    left_out = " ".join(part for part in command if part not in attempt)
                    logger.warning("CPU kernels: %s is built without %s, which is slower: %s", isa, left_out, refused)
                os.replace(made, path)
                return
            refused = refused or done.stderr.strip()[-2000:]
    raise BuildFailed(f"{compiler} failed: {done.stderr.strip()[-2000:]}")
