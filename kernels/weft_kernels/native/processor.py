"""What this machine's processor is and can do, as the system says."""

from __future__ import annotations

import platform
import sys
from functools import cache
from pathlib import Path


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
