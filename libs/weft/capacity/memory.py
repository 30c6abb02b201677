"""How much memory this process may still take: the machine's, and what control groups leave of it. Knows /proc only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from weft.capacity.control_groups import ROOT, lines_of, own_groups


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """File names of one version of control groups. `cache`: of memory.stat, file pages that nobody uses at present."""

    limits: tuple[str, ...]
    usage: str
    cache: str


# beyond memory.high nobody is killed, but made to wait until something was reclaimed
HIERARCHIES = {
    "cgroup2": Hierarchy(("memory.max", "memory.high"), "memory.current", "inactive_file"),
    "cgroup": Hierarchy(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
}


def available_bytes(root: Path = ROOT) -> int:
    """Memory that can be had without swapping and without being killed; where no Linux tells, half of all there is."""
    available = _named(root / "proc/meminfo").get("MemAvailable:")
    if available is None:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return max(0, min([available * 1024, *_left_in_groups(root)]))


def _left_in_groups(root: Path) -> Iterator[int]:
    """By every control group that this process is in."""
    for version, group in own_groups("memory", root):
        yield from _left(HIERARCHIES[version], group)


def _left(hierarchy: Hierarchy, group: Path) -> Iterator[int]:
    """Of one group's limits; the outermost has none."""
    used = "".join(lines_of(group / hierarchy.usage))
    if used:
        cache = _named(group / "memory.stat").get(hierarchy.cache, 0)
        limits = (line for name in hierarchy.limits for line in lines_of(group / name))
        yield from (int(limit) - int(used) + cache for limit in limits if limit != "max")


def _named(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    return {name: int(value.split()[0]) for name, _, value in (line.partition(" ") for line in lines_of(path))}
