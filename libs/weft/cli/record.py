"""A note on disk for each running `weft up`, so that other commands find the mesh without being told its ports."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

    @property
    def is_alive(self) -> bool:
        """Does its `weft up` still run."""
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
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft"


@contextmanager
def recorded(record: MeshRecord) -> Iterator[Path]:
    """Leave the note while the block runs."""
    folder = runtime_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / f"up-{record.port}.json"
    partial = path.with_suffix(f".{record.pid}")
    partial.write_text(json.dumps(dataclasses.asdict(record), indent=1))
    partial.replace(path)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def running_meshes() -> list[MeshRecord]:
    """Meshes of this user that are alive, the latest first; notes of dead ones are ignored."""
    records = [record for note in runtime_folder().glob("up-*.json") if (record := _read(note)) is not None]
    return sorted((record for record in records if record.is_alive), key=lambda record: -record.started)


def _read(path: Path) -> MeshRecord | None:
    try:
        values: dict[str, Any] = json.loads(path.read_text())
        return MeshRecord(**values)
    except (OSError, ValueError, TypeError):
        # vanished in between, or written by another version
        return None
