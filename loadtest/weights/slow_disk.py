"""A disk that gives this process so many bytes a second and no more, by Linux's block throttling. Root only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
NAME = "weft-slow-disk"


class NoThrottle(Exception):
    """This machine lets nobody slow down a disk."""


@contextmanager
def slow_disk(directory: Path, bytes_per_second: int) -> Iterator[None]:
    """Reads of the disk under `directory` by this process and what it starts. Raises NoThrottle."""
    device = disk_of(directory)
    old, new = CGROUPS / "blkio", CGROUPS
    root = old if (old / "blkio.throttle.read_bps_device").exists() else new
    group = root / f"{NAME}-{os.getpid()}"
    try:
        if root is new:
            (root / "cgroup.subtree_control").write_text("+io")
        group.mkdir()
    except OSError as error:
        raise NoThrottle(f"{root}: {error}; it takes root and the io controller") from error
    try:
        if root is old:
            (group / "blkio.throttle.read_bps_device").write_text(f"{device} {bytes_per_second}")
        else:
            (group / "io.max").write_text(f"{device} rbps={bytes_per_second}")
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    except OSError as error:
        raise NoThrottle(f"{group}: {error}") from error
    finally:
        (root / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def disk_of(directory: Path) -> str:
    """Its numbers, of the whole disk where the file system lies on a part of it."""
    number = directory.stat().st_dev
    place = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not place.exists():
        raise NoThrottle(f"{directory} lies on no disk")
    whole = place.resolve().parent if (place / "partition").exists() else place
    return (whole / "dev").read_text().strip()
