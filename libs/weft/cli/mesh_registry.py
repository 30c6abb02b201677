"""A note on disk for each running `weft up`, so that other commands find the mesh without being told its ports."""

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

DEFAULT_URL = "http://127.0.0.1:8000"


@dataclass(frozen=True, slots=True)
class MeshRecord:
    """A mesh that runs on this machine. `services` maps each process name to its host:port."""

    pid: int
    # Unix time
    started: float
    port: int
    url: str
    scheduler: str
    services: Mapping[str, str]
    # when the process began, as the kernel counts: another one may have its number later. 0: not told here
    ticks: int = 0
    # where its pid is one: homes are shared by machines and containers
    host: str = ""

    @classmethod
    def of_this_process(cls, port: int, url: str, scheduler: str, services: Mapping[str, str]) -> MeshRecord:
        """The mesh that this process keeps."""
        return cls(os.getpid(), time.time(), port, url, scheduler, services, _ticks(os.getpid()), platform.node())

    @property
    def is_elsewhere(self) -> bool:
        """Of another machine, about which nothing can be told here."""
        return bool(self.host) and self.host != platform.node()

    @property
    def is_alive(self) -> bool:
        """Does its `weft up` still run, on this machine."""
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
    """Where the notes lie: the session's runtime folder, else a cache folder of the user's own."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.access(runtime, os.W_OK | os.X_OK):  # not so where sudo has kept another user's
        return Path(runtime) / "weft"
    return user_cache_dir()


def _ticks(pid: int) -> int:
    """Since the machine began; 0 where the system does not tell."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


@contextmanager
def recorded(record: MeshRecord, complain: Callable[[str], None] = lambda why: None) -> Iterator[Path]:
    """Leave the note while the block runs. A mesh that nobody finds by itself serves all the same."""
    folder = runtime_folder()
    # two may have one port, of different addresses
    path = folder / f"up-{record.port}-{record.pid}.json"
    partial = path.with_suffix(f".{record.pid}")
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _remove_stale(folder)
        partial.write_text(json.dumps(dataclasses.asdict(record), indent=1))
        partial.replace(path)
    except OSError as error:
        complain(
            f"{folder} cannot be written ({error.strerror}): other commands must be told --scheduler {record.scheduler}"
            f" or --url {record.url}; XDG_RUNTIME_DIR may name a folder of yours"
        )
    try:
        yield path
    finally:
        for note in (partial, path):
            with suppress(OSError):
                note.unlink(missing_ok=True)


def running_meshes() -> list[MeshRecord]:
    """Meshes of this user that are alive, the latest first; notes of dead ones are ignored, and what cannot be read."""
    records: list[MeshRecord] = []
    with suppress(OSError):  # of a folder that may not be looked into, as where sudo has kept another user's home
        records = [record for note in runtime_folder().glob("up-*.json") if (record := _read(note)) is not None]
    return sorted((record for record in records if record.is_alive), key=lambda record: -record.started)


def _remove_stale(folder: Path) -> None:
    """Notes of meshes that were killed."""
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
