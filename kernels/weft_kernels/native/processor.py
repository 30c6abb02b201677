"""Detects the instruction sets of this machine's processor."""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache
from pathlib import Path

# CPU flags that each set requires, by Linux's names; `amx` also needs permission from the kernel.
NEEDED = {
    "avx2": {"avx2", "fma"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "avx512_bf16": {"avx512_bf16"},
    "amx": {"amx_bf16", "amx_tile"},
}


def is_supported_machine() -> bool:
    """Return whether Weft builds kernels for this kind of machine."""
    return platform.machine().lower() in ("x86_64", "amd64") and sys.platform == "linux"


def is_from_intel() -> bool:
    """Return whether Intel made the processor; False if unknown."""
    return "GenuineIntel" in _cpuinfo()


@cache
def processor_features() -> frozenset[str]:
    """Return the CPU flags by Linux's names; the kernel reports only usable register sets."""
    flags = next((line for line in _cpuinfo().splitlines() if line.startswith("flags")), "")
    return frozenset(flags.partition(":")[2].split())


@cache
def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


@cache
def most_isa() -> str:
    """Return the largest instruction set of the processor; each set needs the ones before it."""
    features, most = processor_features() if is_supported_machine() else frozenset(), "torch"
    for isa, needed in NEEDED.items():
        if not needed <= features or (isa == "amx" and not may_use_amx()):
            break
        most = isa
    return most


@cache
def best_isa() -> str:
    """Return the fastest instruction set.

    Intel processors without AMX multiply pairs of bfloat16 at half the speed of floats: 360 prompt tokens a second
    against 600 on an Emerald Rapids. On AMD (Zen 5) the pairs are faster.
    """
    most = most_isa()
    return "avx512" if most == "avx512_bf16" and is_from_intel() else most


def missing_features(isa: str) -> set[str]:
    """Return the flags of `isa` that the processor lacks; its code would crash at the first such instruction.

    Empty if the system does not report flags.
    """
    sets = list(NEEDED.values())
    needed = set[str]().union(*sets[: list(NEEDED).index(isa) + 1])
    features = processor_features()
    return needed - features if features else set()


def may_use_amx() -> bool:
    """Request the AMX tile registers from Linux. All threads of the process then have them.

    See Documentation/arch/x86/xstate.rst of the kernel.
    """
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    asked: int = ctypes.CDLL(None).syscall(
        ctypes.c_long(arch_prctl), ctypes.c_long(request_permission), ctypes.c_long(tile_data)
    )
    return asked == 0
