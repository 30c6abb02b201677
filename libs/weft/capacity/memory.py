"""How much memory this process may still take: the machine's, and what control groups leave of it. Knows /proc only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")


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
    """By every control group that this process is in, from its own up to the outermost one that can be seen."""
    for hierarchy, mount, group in _groups(root):
        while True:
            yield from _left(hierarchy, group)
            if group == mount:
                break
            group = group.parent


def _groups(root: Path) -> Iterator[tuple[Hierarchy, Path, Path]]:
    """Each hierarchy that could count memory, where it is mounted, and this process' own group below that."""
    paths = {}  # by the controllers that a line of version 1 names; version 2 names none
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    for line in _lines(root / "proc/self/mountinfo"):
        mounted, _, kind = line.partition(" - ")
        fields, (name, _, options) = mounted.split(" "), kind.split(" ", 2)
        controller = "" if name == "cgroup2" else "memory"
        is_ours = name in HIERARCHIES and (not controller or controller in options.split(","))
        if is_ours and controller in paths:
            mount, seen = root / fields[4].lstrip("/"), Path(fields[3])
            own = Path(paths[controller])
            # a container without a namespace of its own sees its group alone, mounted as if it were the outermost
            below = own.relative_to(seen) if own.is_relative_to(seen) and ".." not in own.parts else Path()
            yield HIERARCHIES[name], mount, mount / below


def _left(hierarchy: Hierarchy, group: Path) -> Iterator[int]:
    """Of one group's limits; the outermost has none."""
    used = "".join(_lines(group / hierarchy.usage))
    if used:
        cache = _named(group / "memory.stat").get(hierarchy.cache, 0)
        limits = (line for name in hierarchy.limits for line in _lines(group / name))
        yield from (int(limit) - int(used) + cache for limit in limits if limit != "max")


def _named(path: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    return {name: int(value.split()[0]) for name, _, value in (line.partition(" ") for line in _lines(path))}


def _lines(path: Path) -> list[str]:
    """None of a file that cannot be read: limits are looked for, not relied on."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
