"""How many cores' worth of time control groups leave this process. Knows /proc only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from weft.capacity.control_groups import ROOT, lines_of, own_groups


def granted_cores(root: Path = ROOT) -> int | None:
    """Whole cores of the tightest quota, one at least; None without any.

    A process with more busy threads than that has used up its share early in each period, and then stands still.
    """
    quotas = [quota for version, group in own_groups("cpu", root) for quota in _quotas(version, group)]
    return max(1, int(min(quotas))) if quotas else None


def _quotas(version: str, group: Path) -> Iterator[float]:
    files = ("cpu.max",) if version == "cgroup2" else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    words = " ".join(line for name in files for line in lines_of(group / name)).split()
    if len(words) == 2 and words[0] not in ("max", "-1"):
        yield int(words[0]) / int(words[1])
