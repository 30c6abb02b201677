"""Compiles the C++ kernels into one shared library for each instruction set, cached by what goes into it.

Knows compilers and files; knows nothing of what the kernels compute.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from weft_kernels.cache_dir import user_cache_dir

logger = logging.getLogger(__name__)
ROOT = Path(__file__).parents[1]
SOURCES = (
    "fused_decoder/fused_decoder.cpp",
    "kv_write/kv_write.cpp",
    "linear/amx.cpp",
    "linear/linear.cpp",
    "linear/pack.cpp",
    "linear/packed12.cpp",
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
    "linear/packed12.h",
    "linear/packed12_tiles.h",
    "linear/panels.h",
    "linear/results.h",
    "linear/slices.h",
    "linear/tiles.h",
    "native/amx.h",
    "native/vector.h",
    "paged_attention/amx_chunks.h",
    "paged_attention/chunks.h",
    "paged_attention/products.h",
    "paged_attention/rows.h",
    "rans/coder.h",
    "rans/decode_avx2.h",
    "rans/decode_vbmi.h",
    "rans/encode_vbmi.h",
    "rans/format.h",
    "rans/lanes.h",
    "rans/scales.h",
    "rans/stream.h",
    "rans/vbmi.h",
    "rms_norm/rms_norm.h",
    "rope/rotate.h",
    "rope_kv/rope_kv.h",
    "silu_mul/silu_mul.h",
)
COMMON = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-x", "c++")
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
# Of all these something that fails where the compiler knows the option and what stands behind it is missing.
PROBE = """
#ifdef _OPENMP
#include <omp.h>
extern "C" int probe_threads() { return omp_get_max_threads(); }
#endif
#ifdef __AMX_TILE__
#include <immintrin.h>
extern "C" void probe_tiles() { _tile_release(); }
#endif
"""
BUILD_SECONDS = 120  # of one source
MAX_COMPILERS = 4  # at once: each takes 200 to 400 MB
SEAL_BYTES = 20
UNFINISHED = "unfinished-"


class BuildFailed(Exception):
    """There is no compiler, or it did not take the sources."""


def cached_library(isa: str) -> Path:
    """The library of `isa`, built unless it lies in the cache. One that had to do without something, which is logged at
    each call, is built again once that may be there. Raises BuildFailed, OSError, subprocess.TimeoutExpired."""
    path = _full(isa)
    if is_whole(path):
        return path
    makeshift = _makeshift(path)
    try:
        if not _stands(makeshift):
            _build_once(isa, path)
    except (BuildFailed, OSError, subprocess.TimeoutExpired):
        if not is_whole(makeshift):
            raise
    if is_whole(path):
        return path
    note = _note(makeshift)
    logger.warning("CPU kernels: %s is built without %s, which is slower: %s", isa, note["without"], note["refused"])
    return makeshift


def path_of(isa: str) -> Path:
    """Where the library of `isa` lies, once it is built."""
    path = _full(isa)
    return makeshift if (makeshift := _makeshift(path)).exists() and not path.exists() else path


def is_whole(path: Path) -> bool:
    """Is it there, and all that was built: a machine that lost its power may have kept the name and nothing, or zeros,
    behind it."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return len(content) > SEAL_BYTES and _seal(content[:-SEAL_BYTES]) == content[-SEAL_BYTES:]


def library_dir() -> Path:
    """Where built libraries are kept: with the user, or where an image has them ($WEFT_KERNEL_CACHE)."""
    if chosen := os.environ.get("WEFT_KERNEL_CACHE"):
        return Path(chosen)
    return user_cache_dir() / "native"


@cache
def _digest(isa: str) -> str:
    """Of all that it is made from: half a hundred files, which forked workers need not read again."""
    digest = hashlib.blake2b(repr((COMMON, FLAGS[isa], SOURCES, MISSING, SEAL_BYTES)).encode(), digest_size=10)
    for name in (*SOURCES, *HEADERS):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def _full(isa: str) -> Path:
    return library_dir() / f"weft-{isa}-{_digest(isa)}.so"


def _makeshift(path: Path) -> Path:
    """Under a name of its own: it is never taken for a full one."""
    return path.with_suffix(".makeshift.so")


def _note(makeshift: Path) -> dict[str, str]:
    """Without which options it was built, what the compiler said to them, and the compiler's state then."""
    try:
        found: dict[str, str] = json.loads(makeshift.with_suffix(".json").read_text())
    except (OSError, ValueError):
        return {"without": "", "refused": "", "state": ""}
    return found


def _stands(makeshift: Path) -> bool:
    """Is it there, and would another attempt come to the same."""
    note = _note(makeshift)
    return bool(note["without"]) and is_whole(makeshift) and note["state"] == _state(note["without"])


def _state(without: str) -> str:
    """Of the compiler, and whether it takes these options by now, with the libraries and the assembler they need."""
    if (compiler := _compiler()) is None:
        return ""
    stat = os.stat(compiler)
    takes = "takes" if _takes(compiler, without.split()) else "refuses"
    return f"{compiler} {stat.st_size} {stat.st_mtime_ns} {takes}"


def _takes(compiler: str, flags: Sequence[str]) -> bool:
    with tempfile.TemporaryDirectory() as scratch:
        command = [compiler, *COMMON, "-shared", *flags, "-o", f"{scratch}/probe.so", "-"]
        done = subprocess.run(command, input=PROBE, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
    return done.returncode == 0


def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, (os.environ.get("CXX") or "c++", "g++", "clang++"))), None)


def _build_once(isa: str, path: Path) -> None:
    # all may read and none may write: an image builds them as root for a user of its own
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    with open(path.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # many workers may start at once; the first one builds
        for left in path.parent.glob(f"{UNFINISHED}*"):  # by one that was killed: nobody else builds now
            shutil.rmtree(left, ignore_errors=True)
        if not is_whole(path) and not _stands(_makeshift(path)):
            _build(isa, path)


def _build(isa: str, path: Path) -> None:
    if (compiler := _compiler()) is None:
        raise BuildFailed("no C++ compiler found (c++, g++, clang++ or $CXX)")
    with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=path.parent) as scratch:
        made = Path(scratch) / path.name
        logger.info("CPU kernels: %s is being compiled, once, which takes a minute or less", isa)
        flags = (*FLAGS[isa], "-fopenmp")
        refused = ""
        for attempt in dict.fromkeys(tuple(flag for flag in flags if flag not in missing) for missing in MISSING):
            without = [flag for flag in flags if flag not in attempt]
            if without and _takes(compiler, without):
                continue  # these are not what it failed by: memory or a disk may have been full
            wrong = _compile(compiler, attempt, made)
            if not wrong:
                _keep(made, path, " ".join(without), refused)
                return
            refused = refused or wrong
    raise BuildFailed(f"{compiler} failed: {refused}")


def _compile(compiler: str, flags: Sequence[str], made: Path) -> str:
    """All sources, several at once, into one library; what the compiler says against it, if it does."""
    objects = {name: str(made.with_name(f"{number}.o")) for number, name in enumerate(SOURCES)}
    commands = [[compiler, *COMMON, *flags, "-c", "-o", target, str(ROOT / name)] for name, target in objects.items()]
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(min(num_cores, MAX_COMPILERS)) as threads:
        try:
            for wrong in threads.map(_run, commands):
                if wrong:
                    return wrong
        finally:
            threads.shutdown(cancel_futures=True)
    return _run([compiler, "-shared", *flags, "-o", str(made), *objects.values()])


def _run(command: Sequence[str]) -> str:
    """What it complains of, or nothing. Raises subprocess.TimeoutExpired."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
    return done.stderr.strip()[-2000:] or f"status {done.returncode}" if done.returncode else ""


def _keep(made: Path, path: Path, without: str, refused: str) -> None:
    """Whole or not at all, under `path` unless it does without something."""
    seal = _seal(made.read_bytes())
    with open(made, "ab") as file:  # behind the last section, where no loader looks
        file.write(seal)
    target = _makeshift(path) if without else path
    if without:
        note = made.with_suffix(".json")
        note.write_text(json.dumps({"without": without, "refused": refused, "state": _state(without)}))
        os.replace(note, target.with_suffix(".json"))
    _on_disk(made)
    os.replace(made, target)
    _on_disk(target.parent)


def _seal(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=SEAL_BYTES).digest()


def _on_disk(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # some file systems on a network keep names by themselves
            raise
    finally:
        os.close(fd)
