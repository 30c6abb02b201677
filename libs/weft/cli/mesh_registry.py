"""Files that list the running meshes of this user, so that other commands find one without its address."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft_kernels.cache_dir import user_cache_dir


@dataclass(frozen=True, slots=True)
class MeshRecord:
    """A running mesh. `services` maps each process name to its host:port."""

    pid: int
    # Unix time
    started: float
    port: int
    url: str
    scheduler: str
    services: Mapping[str, str]
    # start time of the process in clock ticks, which tells a reused pid apart; 0: unknown
    ticks: int = 0
    # machine of the pid: machines and containers may share a home folder
    host: str = ""

    @classmethod
    def of_this_process(cls, port: int, url: str, scheduler: str, services: Mapping[str, str]) -> MeshRecord:
        """Return the record of the mesh that this process runs."""
        return cls(os.getpid(), time.time(), port, url, scheduler, services, _ticks(os.getpid()), platform.node())

    @property
    def is_elsewhere(self) -> bool:
        """True if the mesh runs on another machine, where its pid cannot be checked."""
        return bool(self.host) and self.host != platform.node()

    @property
    def is_alive(self) -> bool:
        """True if its `weft up` still runs on this machine."""
        if self.is_elsewhere:
            return False
        if self.ticks and (ticks := _ticks(self.pid)) and ticks != self.ticks:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


def runtime_folder() -> Path:
    """Return the folder of the records: $XDG_RUNTIME_DIR/weft, else the user's cache folder."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.access(runtime, os.W_OK | os.X_OK):  # sudo may have kept another user's
        return Path(runtime) / "weft"
    return user_cache_dir()


def _ticks(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot; 0 if unknown."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


@contextmanager
def recorded(record: MeshRecord, complain: Callable[[str], None] = lambda why: None) -> Iterator[Path]:
    """Keep the record on disk while the block runs. A failure to write it is reported and does not stop the mesh."""
    folder = runtime_folder()
    # two meshes may use the same port on different addresses
    path = folder / f"up-{record.port}-{record.pid}.json"
    partial = path.with_suffix(f".{record.pid}")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _remove_stale(folder)
        partial.write_text(json.dumps(dataclasses.asdict(record), indent=1))
        partial.replace(path)
    except OSError as error:
        complain(
            f"{folder} cannot be written ({error.strerror}): other commands need --scheduler {record.scheduler}"
            f" or --url {record.url}; set XDG_RUNTIME_DIR to a folder that you can write"
        )
    try:
        yield path
    finally:
        for note in (partial, path):
            with suppress(OSError):
                note.unlink(missing_ok=True)


def running_meshes() -> list[MeshRecord]:
    """Return the live meshes of this user, latest first. Skips records that are stale or unreadable."""
    records: list[MeshRecord] = []
    with suppress(OSError):  # a folder without access, such as another user's home kept by sudo
        records = [record for note in runtime_folder().glob("up-*.json") if (record := _read(note)) is not None]
    return sorted((record for record in records if record.is_alive), key=lambda record: -record.started)


def _remove_stale(folder: Path) -> None:
    """Remove the records of meshes that were killed."""
    for note in folder.glob("up-*.json"):
        if (record := _read(note)) is not None and not (record.is_alive or record.is_elsewhere):
            with suppress(OSError):
                note.unlink()


def _read(path: Path) -> MeshRecord | None:
    try:
        values: dict[str, Any] = json.loads(path.read_text())
        return MeshRecord(**values)
    except (OSError, ValueError, TypeError):
        # vanished in between, or written by another version
        return None
