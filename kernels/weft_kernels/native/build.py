"""Compiles a set of C++ sources into one shared library per instruction set, cached by a digest of the sources."""

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
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from weft_kernels.cache_dir import user_cache_dir

logger = logging.getLogger(__name__)
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class SourceSet:
    """Sources and headers of one library; paths count from `root`. They may include headers of `weft_kernels`."""

    library: str
    root: Path
    sources: tuple[str, ...]
    headers: tuple[str, ...]


KERNELS = SourceSet(
    library="weft",
    root=ROOT,
    sources=(
        "collectives/shared.cpp",
        "fused_decoder/fused_decoder.cpp",
        "head_product/head_product.cpp",
        "kv_write/kv_write.cpp",
        "linear/amx.cpp",
        "linear/linear.cpp",
        "linear/pack.cpp",
        "linear/packed12.cpp",
        "native/threads.cpp",
        "paged_attention/chunks.cpp",
        "paged_attention/rows.cpp",
        "rms_norm/rms_norm.cpp",
        "rope/rope.cpp",
        "rope_kv/rope_kv.cpp",
        "sampling/race.cpp",
        "silu_mul/silu_mul.cpp",
    ),
    headers=(
        "collectives/shared.h",
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
        "paged_attention/row_groups.h",
        "paged_attention/rows.h",
        "rms_norm/rms_norm.h",
        "rope/rotate.h",
        "rope_kv/rope_kv.h",
        "silu_mul/silu_mul.h",
    ),
)
COMMON = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-x", "c++")
AVX512 = ("-DWEFT_WIDTH=16", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma")
AMX = ("-mavx512bf16", "-mamx-tile", "-mamx-bf16")
# A processor that can run one of these can run the ones before it.
FLAGS = {
    "avx2": ("-DWEFT_WIDTH=8", "-mavx2", "-mfma"),
    "avx512": AVX512,
    "avx512_bf16": (*AVX512, "-mavx512bf16"),
    "amx": (*AVX512, *AMX),
}
NEW = AMX
# Options that a compiler may lack. Without OpenMP, kernels run on one thread; with it they share torch's threads.
MISSING = ((), NEW, ("-fopenmp",), (*NEW, "-fopenmp"))
# Fails to build if the compiler knows an option but its library or assembler support is missing.
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
BUILD_SECONDS = 120  # per source
MAX_COMPILERS = 4  # concurrent; each takes 200 to 400 MB
SEAL_BYTES = 20
UNFINISHED = "unfinished-"


class BuildFailed(Exception):
    """There is no compiler, or it rejected the sources."""


def cached_library(isa: str, code: SourceSet = KERNELS) -> Path:
    """Return the library of `isa`; build it if the cache has none.

    A library that was built without some options logs a warning at each call, and is rebuilt once those options work.
    Raises BuildFailed, OSError, subprocess.TimeoutExpired.
    """
    path = _full(isa, code)
    if is_whole(path):
        return path
    makeshift = _makeshift(path)
    try:
        if not _stands(makeshift):
            _build_once(isa, code, path)
    except (BuildFailed, OSError, subprocess.TimeoutExpired):
        if not is_whole(makeshift):
            raise
    if is_whole(path):
        return path
    note = _note(makeshift)
    logger.warning("CPU kernels: %s is built without %s, which is slower: %s", isa, note["without"], note["refused"])
    return makeshift


def path_of(isa: str, code: SourceSet = KERNELS) -> Path:
    """Return the path of the built library of `isa`."""
    path = _full(isa, code)
    return makeshift if (makeshift := _makeshift(path)).exists() and not path.exists() else path


def is_whole(path: Path) -> bool:
    """Return whether the file exists and is complete.

    After a power failure a file may exist but be empty or hold zeros.
    """
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return len(content) > SEAL_BYTES and _seal(content[:-SEAL_BYTES]) == content[-SEAL_BYTES:]


def library_dir() -> Path:
    """Return the directory of built libraries: in the user's cache, or $WEFT_KERNEL_CACHE."""
    if chosen := os.environ.get("WEFT_KERNEL_CACHE"):
        return Path(chosen)
    return user_cache_dir() / "native"


@cache
def _digest(isa: str, code: SourceSet) -> str:
    """Return a digest of all sources and options. Cached: forked workers need not read some 35 files again."""
    digest = hashlib.blake2b(repr((COMMON, FLAGS[isa], code.sources, MISSING, SEAL_BYTES)).encode(), digest_size=10)
    for name in (*code.sources, *code.headers):
        digest.update((code.root / name).read_bytes())
    return digest.hexdigest()


def _full(isa: str, code: SourceSet) -> Path:
    return library_dir() / f"{code.library}-{isa}-{_digest(isa, code)}.so"


def _makeshift(path: Path) -> Path:
    """Return the path of a library built without some options; never mistaken for a full one."""
    return path.with_suffix(".makeshift.so")


def _note(makeshift: Path) -> dict[str, str]:
    """Return the options left out, the compiler's message, and the compiler's state at that time."""
    try:
        found: dict[str, str] = json.loads(makeshift.with_suffix(".json").read_text())
    except (OSError, ValueError):
        return {"without": "", "refused": "", "state": ""}
    return found


def _stands(makeshift: Path) -> bool:
    """Return whether the makeshift library is complete and another build would give the same."""
    note = _note(makeshift)
    return bool(note["without"]) and is_whole(makeshift) and note["state"] == _state(note["without"])


def _state(without: str) -> str:
    """Return a fingerprint of the compiler and whether it now accepts these options."""
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


def _build_once(isa: str, code: SourceSet, path: Path) -> None:
    # All users may read and none may write: an image builds as root and runs as another user.
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    with open(path.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # many workers may start at once; the first one builds
        for left in path.parent.glob(f"{UNFINISHED}*"):  # left by a killed build; the lock excludes a running one
            shutil.rmtree(left, ignore_errors=True)
        if not is_whole(path) and not _stands(_makeshift(path)):
            _build(isa, code, path)


def _build(isa: str, code: SourceSet, path: Path) -> None:
    if (compiler := _compiler()) is None:
        raise BuildFailed("no C++ compiler found (c++, g++, clang++ or $CXX)")
    with tempfile.TemporaryDirectory(prefix=UNFINISHED, dir=path.parent) as scratch:
        made = Path(scratch) / path.name
        logger.info("CPU kernels: %s-%s is being compiled, once, which takes a minute or less", code.library, isa)
        flags = (*FLAGS[isa], "-fopenmp")
        refused = ""
        for attempt in dict.fromkeys(tuple(flag for flag in flags if flag not in missing) for missing in MISSING):
            without = [flag for flag in flags if flag not in attempt]
            if without and _takes(compiler, without):
                continue  # these options work, so the build failed for another reason, such as a full disk
            wrong = _compile(compiler, code, attempt, made)
            if not wrong:
                _keep(made, path, " ".join(without), refused)
                return
            refused = refused or wrong
    raise BuildFailed(f"{compiler} failed: {refused}")


def _compile(compiler: str, code: SourceSet, flags: Sequence[str], made: Path) -> str:
    """Compile all sources, several at once, and link them. Returns the compiler's error message, or nothing."""
    objects = {name: str(made.with_name(f"{number}.o")) for number, name in enumerate(code.sources)}
    command = [compiler, *COMMON, *flags, f"-I{ROOT}", "-c", "-o"]
    commands = [[*command, target, str(code.root / name)] for name, target in objects.items()]
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
    """Run a command. Returns its error output, or nothing. Raises subprocess.TimeoutExpired."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
    return done.stderr.strip()[-2000:] or f"status {done.returncode}" if done.returncode else ""


def _keep(made: Path, path: Path, without: str, refused: str) -> None:
    """Publish the library atomically; under `path` only if no option was left out."""
    seal = _seal(made.read_bytes())
    with open(made, "ab") as file:  # after the last section, where no loader looks
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
        if error.errno != errno.EINVAL or not path.is_dir():  # some network file systems cannot fsync a directory
            raise
    finally:
        os.close(fd)
