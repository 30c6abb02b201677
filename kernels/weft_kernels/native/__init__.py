"""Loads the C++ kernels for this machine's CPU, or nothing if they cannot be built; then torch computes instead.

This package does not import torch: services that only decode weights start two seconds earlier without it.
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
    KERNELS,
    BuildFailed,
    SourceSet,
    cached_library,
    is_whole,
    path_of,
)
from weft_kernels.native.processor import best_isa, may_use_amx, missing_features

logger = logging.getLogger(__name__)
# Setting: amx, avx512_bf16, avx512, avx2 or torch; empty means the fastest set of this machine.
CHOICE = "WEFT_CPU_KERNELS"
# Number of polls after which a waiting thread of GNU OpenMP sleeps.
SPINS = "GOMP_SPINCOUNT"
POINTER, LONG, INT, FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
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
    "weft_fused_decoder_f32_f32": [POINTER, POINTER, INT],
    "weft_fused_decoder_f32_bf16": [POINTER, POINTER, INT],
    "weft_fused_decoder_bf16_bf16": [POINTER, POINTER, INT],
    "weft_fused_decoder_f32_packed12": [POINTER, POINTER, INT],
    "weft_race": [POINTER, LONG, LONG, LONG, *[POINTER] * 6, INT],
    "weft_kv_write": [POINTER, POINTER, POINTER, LONG, LONG, LONG, LONG, LONG, POINTER],
}
# Each exists for float32 and bfloat16: weft_NAME_f32, weft_NAME_bf16.
ROW_KERNELS: dict[str, list[type]] = {
    "attend": [POINTER, POINTER, POINTER, POINTER, POINTER, POINTER, FLOAT, POINTER, INT],
    "attend_chunk": [POINTER, POINTER, POINTER, POINTER, POINTER, FLOAT, POINTER, INT],
    "rms_norm": [POINTER, POINTER, POINTER, LONG, LONG, LONG, LONG, FLOAT, INT],
    "add_rms_norm": [POINTER, POINTER, POINTER, POINTER, POINTER, LONG, LONG, FLOAT, INT],
    "rope": [POINTER, POINTER, POINTER, POINTER, LONG, LONG, LONG, LONG, INT],
    "head_product": [POINTER, POINTER, POINTER, LONG, LONG, LONG, LONG, LONG, LONG, INT],
    "rope_kv": [POINTER, POINTER, POINTER, POINTER, POINTER, POINTER, LONG, LONG, INT],
    "silu_mul": [POINTER, POINTER, LONG, LONG, INT],
    "gelu_mul": [POINTER, POINTER, LONG, LONG, INT],
}
SUFFIXES = ("f32", "bf16")
# Functions that the AMX library does not export.
NOT_IN_AMX: dict[str, list[type]] = {
    "weft_linear_bf16_packed12": SIGNATURES["weft_linear_bf16_bf16"],
    "weft_fused_decoder_bf16_packed12": SIGNATURES["weft_fused_decoder_bf16_bf16"],
}
WITH_RESULT: dict[str, tuple[list[type], type]] = {
    "weft_pair_lines": ([LONG], LONG),
    "weft_shared_sum_f32": ([POINTER, POINTER, LONG], LONG),
    "weft_shared_sum_bf16": ([POINTER, POINTER, LONG], LONG),
    "weft_shared_gather": ([POINTER, POINTER, LONG, POINTER, POINTER], LONG),
    "weft_packed12_pack": ([POINTER, LONG, LONG, *[POINTER] * 5, LONG, INT], LONG),
}


def native() -> ctypes.CDLL | None:
    """Return the library for this machine. The first call may compile it: call it while loading, never in a request."""
    return load(chosen_isa())


def preload() -> None:
    """Open the library if it is built, so that processes forked later find its name and code in memory."""
    isa = chosen_isa()
    with suppress(OSError):  # `load` reports the error
        if isa in FLAGS and is_whole(path := path_of(isa)):
            ctypes.CDLL(str(path))


def chosen_isa() -> str:
    """Return the instruction set of the setting, or the fastest of this machine."""
    return os.environ.get(CHOICE, "") or best_isa()


def release_threads() -> None:
    """End the OpenMP threads that wait for the calling thread, after its last large kernel.

    If a process has more such threads than cores, GNU OpenMP ignores GOMP_SPINCOUNT and lets waiting threads sleep
    at once. Waking them costs more than many kernels. One thread loads a model and another one runs it.
    """
    library = native()
    if library is not None and SPINS in os.environ:  # otherwise the threads might spin for milliseconds
        library.weft_release_threads()


def _open_file(path: Path) -> ctypes.CDLL:
    """Open a library with the OpenMP runtime of torch, if torch is imported, so that both share one set of threads.

    Otherwise the system's runtime is used; if there is none, import torch, which brings one. Raises OSError.
    """
    try:
        return ctypes.CDLL(str(path))
    except OSError:
        if "torch" in sys.modules or importlib.util.find_spec("torch") is None:
            raise
        importlib.import_module("torch")
        return ctypes.CDLL(str(path))


@cache
def load(isa: str) -> ctypes.CDLL | None:
    """Return the kernels' library of one instruction set, with its signatures; None as `open_library`."""
    if (library := open_library(isa, KERNELS)) is None:
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
    return library


def open_library(isa: str, code: SourceSet) -> ctypes.CDLL | None:
    """Build if needed and open the library of one instruction set.

    None for `torch`, and for a library that cannot be built or opened; the reason is logged.
    """
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
        library = _open_file(cached_library(isa, code))
    except (BuildFailed, OSError, subprocess.TimeoutExpired) as error:
        logger.warning("CPU kernels: torch, which is slower; %s cannot be had: %s", isa, error)
        return None
    logger.info("CPU kernels: %s", isa)
    return library
