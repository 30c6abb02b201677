"""Memory and CPU time that the machine and its control groups (cgroup v1 and v2) leave to this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class MemoryFiles:
    """File names of one cgroup version. `cache`: the field of memory.stat that counts reclaimable file pages."""

    limits: tuple[str, ...]
    usage: str
    cache: str


# memory.high throttles instead of killing, but a worker that exceeds it stalls, so it counts as a limit too.
MEMORY_FILES = {
    "cgroup2": MemoryFiles(("memory.max", "memory.high"), "memory.current", "inactive_file"),
    "cgroup": MemoryFiles(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
}


def available_bytes(root: Path = ROOT) -> int:
    """Return the bytes that this process can allocate without swapping and without exceeding a cgroup limit.

    Returns half of the physical memory where /proc/meminfo does not report MemAvailable (not Linux).
    """
    available = _read_fields(root / "proc/meminfo").get("MemAvailable:")
    if available is None:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return max(0, min([available * 1024, *_bytes_left_in_groups(root)]))


def granted_cores(root: Path = ROOT) -> int | None:
    """Return the whole cores of the tightest CPU quota, at least 1; None without a quota.

    A process with more busy threads spends its quota early in each period and then stalls.
    """
    quotas = [quota for version, group in own_groups("cpu", root) for quota in _cpu_quotas(version, group)]
    return max(1, int(min(quotas))) if quotas else None


def own_groups(controller: str, root: Path = ROOT) -> Iterator[tuple[str, Path]]:
    """Yield version and directory of every control group that may limit this process through `controller`.

    Covers every hierarchy, from the process's own group up to the outermost visible one.
    """
    for version, mount, group in _mounted_groups(controller, root):
        yield version, group
        while group != mount:
            group = group.parent
            yield version, group


def _bytes_left_in_groups(root: Path) -> Iterator[int]:
    for version, group in own_groups("memory", root):
        yield from _bytes_left(MEMORY_FILES[version], group)


def _bytes_left(files: MemoryFiles, group: Path) -> Iterator[int]:
    """Yield what each limit of one group leaves. The outermost group has no limits."""
    used = "".join(_read_lines(group / files.usage))
    if used:
        cache = _read_fields(group / "memory.stat").get(files.cache, 0)
        limits = (line for name in files.limits for line in _read_lines(group / name))
        yield from (int(limit) - int(used) + cache for limit in limits if limit != "max")


def _cpu_quotas(version: str, group: Path) -> Iterator[float]:
    files = ("cpu.max",) if version == "cgroup2" else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    values = " ".join(line for name in files for line in _read_lines(group / name)).split()
    if len(values) == 2 and values[0] not in ("max", "-1"):
        yield int(values[0]) / int(values[1])


def _mounted_groups(controller: str, root: Path) -> Iterator[tuple[str, Path, Path]]:
    """Yield version, mount point and this process's own group of each hierarchy with that controller."""
    paths = {}  # key: controller name (v1), or "" (v2)
    for line in _read_lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    for line in _read_lines(root / "proc/self/mountinfo"):
        mounted, _, kind = line.partition(" - ")
        fields, (version, _, options) = mounted.split(" "), kind.split(" ", 2)
        wanted = "" if version == "cgroup2" else controller
        is_hierarchy = version in MEMORY_FILES and (not wanted or wanted in options.split(","))
        if is_hierarchy and wanted in paths:
            mount, visible = root / fields[4].lstrip("/"), Path(fields[3])
            own = Path(paths[wanted])
            # A container without a cgroup namespace sees only its own group, mounted at the top of the hierarchy.
            below = own.relative_to(visible) if own.is_relative_to(visible) and ".." not in own.parts else Path()
            yield version, mount, mount / below


def _read_fields(path: Path) -> dict[str, int]:
    """Parse lines of a name and a number."""
    return {name: int(value.split()[0]) for name, _, value in (line.partition(" ") for line in _read_lines(path))}


def _read_lines(path: Path) -> list[str]:
    """Return the lines of a file, or none if it cannot be read: limits are optional."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
