"""What this machine's processor is and can do, as the system says."""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache
from pathlib import Path

# What the processor must have for each, by Linux's names; `amx` is for those whose system lets them.
NEEDED = {
    "avx2": {"avx2", "fma"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "avx512_bf16": {"avx512_bf16"},
    "amx": {"amx_bf16", "amx_tile"},
}


def is_supported_machine() -> bool:
    """Is there a build for this kind of processor at all?"""
    return platform.machine().lower() in ("x86_64", "amd64") and sys.platform == "linux"


def is_from_intel() -> bool:
    """Has Intel made the processor? Where nothing says so, no."""
    return "GenuineIntel" in _cpuinfo()


@cache
def processor_features() -> frozenset[str]:
    """By Linux's names, and only those whose registers the system keeps."""
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
    """The most that the processor can do; each set needs those before it."""
    features, most = processor_features() if is_supported_machine() else frozenset(), "torch"
    for isa, needed in NEEDED.items():
        if not needed <= features or (isa == "amx" and not may_use_amx()):
            break
        most = isa
    return most


@cache
def best_isa() -> str:
    """The quickest of what it can do.

    Where Intel's processors have no matrix unit, or their system does not give it, pairs of bfloat16 are multiplied at
    half the speed of floats: 360 tokens of a prompt a second against 600 on an Emerald Rapids. On AMD's (Zen 5) they
    are the quicker way.
    """
    most = most_isa()
    return "avx512" if most == "avx512_bf16" and is_from_intel() else most


def missing_features(isa: str) -> set[str]:
    """What the processor has not of all that is needed: its code would end the process at the first instruction. Where
    the system does not tell what it has, nothing."""
    sets = list(NEEDED.values())
    needed = set[str]().union(*sets[: list(NEEDED).index(isa) + 1])
    features = processor_features()
    return needed - features if features else set()


def may_use_amx() -> bool:
    """Ask Linux for the matrix unit's registers, which are large and for those who ask. All threads of the process
    have them from then on (the kernel's Documentation/arch/x86/xstate.rst)."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    asked: int = ctypes.CDLL(None).syscall(
        ctypes.c_long(arch_prctl), ctypes.c_long(request_permission), ctypes.c_long(tile_data)
    )
    return asked == 0
