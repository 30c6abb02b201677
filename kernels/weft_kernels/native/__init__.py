"""The C++ kernels of this machine's CPU, or nothing where they cannot be built: then torch does their work.

Knows no torch: services that only decode weights start two seconds sooner without it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

from weft_kernels.native.build import (
    FLAGS,
    BuildFailed,
    cached_library,
    is_whole,
    path_of,
)
from weft_kernels.native.processor import best_isa, may_use_amx, missing_features

logger = logging.getLogger(__name__)
# What this machine should use: amx, avx512_bf16, avx512, avx2 or torch; empty: the best that it has.
CHOICE = "WEFT_CPU_KERNELS"
# How often GNU's OpenMP looks again before a thread that waits goes to sleep.
SPINS = "GOMP_SPINCOUNT"
POINTER, LONG, INT, FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
DOUBLE = ctypes.c_double
SIGNATURES: dict[str, list[type]] = {
    "weft_release_threads": [],
    "weft_pack_f32_bf16": [POINTER, LONG, LONG, POINTER, INT],
    "weft_pack_bf16_bf16": [POINTER, LONG, LONG, POINTER, INT],
    "weft_pack_f32_f32": [POINTER, LONG, LONG, POINTER, INT],
    "weft_linear_f32_bf16": [POINTER, LONG, LONG, LONG, POINTER, POINTER, POINTER, INT],
    "weft_linear_f32_f32": [POINTER, LONG, LONG, LONG, POINTER, POINTER, POINTER, INT],
    "weft_linear_bf16_bf16": [POINTER, LONG, LONG, LONG, POINTER, POINTER, POINTER, INT],
    "weft_linear_f32_packed12": [POINTER, LONG, LONG, LONG, POINTER, POINTER, POINTER, INT],
    "weft_packed12_count": [POINTER, LONG, LONG, LONG, POINTER],
    "weft_rans_decode": [POINTER, LONG, INT],
    "weft_rans_tables": [POINTER, INT, POINTER],
    "weft_rans_slots": [POINTER, INT, POINTER, POINTER],
    "weft_fused_decoder_f32_f32": [POINTER, POINTER, INT],
    "weft_fused_decoder_f32_bf16": [POINTER, POINTER, INT],
    "weft_fused_decoder_bf16_bf16": [POINTER, POINTER, INT],
    "weft_fused_decoder_f32_packed12": [POINTER, POINTER, INT],
    "weft_kv_write": [POINTER, POINTER, POINTER, LONG, LONG, LONG, LONG, LONG, LONG, LONG],
}
# Each for float32 and bfloat16: weft_..._f32, weft_..._bf16.
ROW_KERNELS: dict[str, list[type]] = {
    "attend": [POINTER, POINTER, POINTER, POINTER, POINTER, POINTER, FLOAT, INT],
    "attend_chunk": [POINTER, POINTER, POINTER, POINTER, POINTER, FLOAT, INT],
    "rms_norm": [POINTER, POINTER, POINTER, LONG, LONG, LONG, LONG, FLOAT, INT],
    "add_rms_norm": [POINTER, POINTER, POINTER, POINTER, POINTER, LONG, LONG, FLOAT, INT],
    "rope": [POINTER, POINTER, POINTER, POINTER, LONG, LONG, LONG, LONG, INT],
    "rope_kv": [POINTER, POINTER, POINTER, POINTER, POINTER, POINTER, POINTER, INT],
    "silu_mul": [POINTER, POINTER, LONG, LONG, INT],
}
SUFFIXES = ("f32", "bf16")
# What the set for Intel's matrix unit has not.
NOT_IN_AMX: dict[str, list[type]] = {
    "weft_linear_bf16_packed12": SIGNATURES["weft_linear_bf16_bf16"],
    "weft_fused_decoder_bf16_packed12": SIGNATURES["weft_fused_decoder_bf16_bf16"],
}
WITH_RESULT: dict[str, tuple[list[type], type]] = {
    "weft_rans_choose": ([POINTER, LONG, LONG, INT, *[POINTER] * 4], DOUBLE),
    "weft_rans_encode": ([*[POINTER] * 6, INT, INT, *[POINTER] * 4], LONG),
    "weft_pair_lines": ([LONG], LONG),
    "weft_packed12_pack": ([POINTER, LONG, LONG, *[POINTER] * 5, LONG, INT], LONG),
}


def native() -> ctypes.CDLL | None:
    """The library for this machine. The first call may compile it: it belongs to loading, never to a request."""
    return load(_chosen())


def preload() -> None:
    """Where it is built already: children that this process forks find its name, and its code in memory."""
    isa = _chosen()
    with suppress(OSError):  # whoever loads it says what is wrong
        if isa in FLAGS and is_whole(path := path_of(isa)):
            ctypes.CDLL(str(path))


def _chosen() -> str:
    return os.environ.get(CHOICE, "") or best_isa()


def release_threads() -> None:
    """End the OpenMP threads that wait for the calling thread, which has made its last large kernel run.

    While a process has more of these than cores, GNU's OpenMP lets all that wait sleep at once, whatever GOMP_SPINCOUNT
    says, and waking them costs more than many a kernel: a model is loaded by one thread and run by another.
    """
    library = native()
    if library is not None and SPINS in os.environ:  # else they might spin for milliseconds
        library.weft_release_threads()


def _open_library(path: Path) -> ctypes.CDLL:
    """It finds torch's OpenMP runtime where torch has been imported: one set of threads. Elsewhere the system's, and
    where that has none, torch brings one. Raises OSError."""
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        if "torch" in sys.modules or importlib.util.find_spec("torch") is None:
            raise
        importlib.import_module("torch")
        return ctypes.CDLL(str(path))


@cache
def load(isa: str) -> ctypes.CDLL | None:
    """The library of one instruction set; None for `torch` and where it cannot be had, which is logged once."""
    if isa == "torch":
        logger.info("CPU kernels: torch")
        return None
    if isa not in FLAGS:
        raise ValueError(f"{CHOICE}: expected one of {', '.join((*FLAGS, 'torch'))}, found {isa!r}")
    try:
        if lacking := missing_features(isa):
            raise OSError(f"the processor lacks {', '.join(sorted(lacking))}")
        if isa == "amx" and not may_use_amx():
            raise OSError("the system does not give the matrix unit's registers")
        library = _open_library(cached_library(isa))
    except (BuildFailed, OSError, subprocess.TimeoutExpired) as error:
        logger.warning("CPU kernels: torch, which is slower; %s cannot be had: %s", isa, error)
        return None
    for_rows = {f"weft_{name}_{suffix}": types for name, types in ROW_KERNELS.items() for suffix in SUFFIXES}
    others = {name: types for name, types in NOT_IN_AMX.items() if hasattr(library, name)}
    for name, types in {**SIGNATURES, **others, **for_rows}.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, None
    for name, (types, result) in WITH_RESULT.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, result
    for name in ("weft_panel", "weft_width"):
        getattr(library, name).restype = LONG
    logger.info("CPU kernels: %s", isa)
    return library
