"""A disk that gives this process so many bytes a second and no more, by Linux's block throttling. Root only, and where
control groups of the first version are mounted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

BLKIO = Path("/sys/fs/cgroup/blkio")


class NoThrottle(Exception):
    """This machine lets nobody slow down a disk."""


@contextmanager
def slow_disk(directory: Path, bytes_per_second: int) -> Iterator[None]:
    """Reads of the disk under `directory` by this process; what it starts meanwhile has to end before. Raises
    NoThrottle."""
    device, before = disk_of(directory), _own_group()
    group = BLKIO / f"weft-slow-disk-{os.getpid()}"
    try:
        group.mkdir()
        (group / "blkio.throttle.read_bps_device").write_text(f"{device} {bytes_per_second}")
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        with suppress(OSError):
            group.rmdir()
        raise NoThrottle(f"{group}: {error}; it takes root and the blkio controller") from error
    try:
        yield
    finally:
        (before / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def _own_group() -> Path:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "blkio" in controllers.split(","):
            return BLKIO / path.lstrip("/")
    raise NoThrottle("there is no blkio controller of control groups' first version")


def disk_of(directory: Path) -> str:
    """Its numbers, of the whole disk where the file system lies on a part of it."""
    number = directory.stat().st_dev
    place = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not place.exists():
        raise NoThrottle(f"{directory} lies on no disk")
    whole = place.resolve().parent if (place / "partition").exists() else place
    return (whole / "dev").read_text().strip()
