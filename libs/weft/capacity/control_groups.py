"""The control groups that this process is in, of either version, as directories of files. Knows /proc only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
VERSIONS = ("cgroup2", "cgroup")


def own_groups(controller: str, root: Path = ROOT) -> Iterator[tuple[str, Path]]:
    """Version and directory of each group that could limit this process by that controller: from its own up to the
    outermost one that can be seen, of every hierarchy."""
    for kind, mount, group in _mounted(controller, root):
        yield kind, group
        while group != mount:
            group = group.parent
            yield kind, group


def lines_of(path: Path) -> list[str]:
    """None of a file that cannot be read: limits are looked for, not relied on."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _mounted(controller: str, root: Path) -> Iterator[tuple[str, Path, Path]]:
    """Each hierarchy with that controller, where it is mounted, and this process' own group below that."""
    paths = {}  # by the controllers that a line of version 1 names; version 2 names none
    for line in lines_of(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    for line in lines_of(root / "proc/self/mountinfo"):
        mounted, _, kind = line.partition(" - ")
        fields, (name, _, options) = mounted.split(" "), kind.split(" ", 2)
        wanted = "" if name == "cgroup2" else controller
        is_ours = name in VERSIONS and (not wanted or wanted in options.split(","))
        if is_ours and wanted in paths:
            mount, seen = root / fields[4].lstrip("/"), Path(fields[3])
            own = Path(paths[wanted])
            # a container without a namespace of its own sees its group alone, mounted as if it were the outermost
            below = own.relative_to(seen) if own.is_relative_to(seen) and ".." not in own.parts else Path()
            yield name, mount, mount / below
