"""Creates a directory completely or not at all.

Work happens in `<target>.partial`, which a killed run leaves for the next run of the same source. At the end it is
renamed to the target.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weft.errors import BadCheckpoint
from weft.file_io import copy_ownership, fsync_path, with_filename
from weft.weights.draft_checkpoint import BESIDE
from weft.weights.storage import stamp_of

NOTE = ".weft-made-of.json"
"""File in the partial directory that names its source, so that files of another source never stay in it."""
Stamps = Mapping[str, tuple[str, ...]]
"""Stamps of the files of a directory by relative name; a rewritten file has another stamp."""


def source_files(source: Path) -> list[Path]:
    """Return the files of a checkpoint: those in `source`, and those of a draft head in its folder. Raises OSError."""
    return [path for path in _entries(source) if path.is_file()]


def stamps_of(source: Path) -> Stamps:
    """Return the stamps of these files by their names relative to `source`. Raises OSError."""
    return {str(path.relative_to(source)): stamp_of(path.stat()) for path in source_files(source)}


def _entries(source: Path) -> list[Path]:
    """Return what lies in `source`, and then what lies in its draft head's folder, each in order of names."""
    folder = source / BESIDE
    has_draft = (folder / "config.json").is_file()
    return [path for each in (source, *[folder] * has_draft) for path in sorted(each.iterdir())]


@contextmanager
def atomic_directory(made: Mapping[Path, str], target: Path, before: Stamps) -> Iterator[Path]:
    """Yield a working directory that becomes `target`, with copies of the other files of the source.

    made: source files, the first one not of the draft head, and the relative names of the files made from them.
    before: stamps of the source at the first look.
    Raises OSError, and BadCheckpoint naming a source file that changed: the result might mix old and new files.
    """
    source, note = next(iter(made)).parent, _note_of(list(made), before)
    _resume_renamed(target, note)
    place = _place_for(target, source.resolve())
    _check_copies(source, made, before)
    try:
        place.mkdir(0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(target)) from error
    with _locked(place):
        _begin(place, note)
        place.chmod(0o700)  # it gets the source's permissions once it is complete
        if any(Path(name).parent != Path() for name in before):
            (place / BESIDE).mkdir(0o700, exist_ok=True)
        yield place
        _check_same(source, before)
        _copy_others(source, place, made, before)
        _check_same(source, before)
        copy_ownership(source, place)
        place.chmod(place.stat().st_mode | 0o700)  # the note must still be deleted
        # Flush the files first: after a power failure the name must not refer to missing data.
        fsync_path(place)
        os.replace(place, target)
        (target / NOTE).unlink()
        copy_ownership(source, target)
        fsync_path(target)
        fsync_path(target.parent)


@contextmanager
def _locked(place: Path) -> Iterator[None]:
    """Hold an exclusive lock on the directory, even if it is renamed. Raises BadCheckpoint, OSError."""
    lock = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadCheckpoint(f"{place}: another process is at work there") from None
        yield
    finally:
        os.close(lock)


def _resume_renamed(target: Path, note: Any) -> None:
    """Resume a run of the same source that was killed between the rename and its end."""
    if _read(target / NOTE) != note or target.is_symlink():
        return
    with _locked(target):  # a run that is about to end still holds it
        if _read(target / NOTE) == note and not os.path.lexists(place := _partial(target)):
            os.replace(target, place)


def _partial(target: Path) -> Path:
    return target.with_name(target.name + ".partial")


def _place_for(target: Path, source: Path) -> Path:
    """Return the working directory. Checks before any work that the target is free and outside the source."""
    # A dangling link also occupies the name; `..` resolves only if its parent exists.
    if os.path.lexists(target) or target.resolve().exists():
        raise BadCheckpoint(f"{target}: is there already; choose another place or remove it")
    if source in target.resolve().parents:
        raise BadCheckpoint(f"{target}: lies inside {source}")
    place = _partial(target)
    if place.resolve() in (source, *source.parents):
        raise BadCheckpoint(f"{target}: is made in {place}, and {source} lies there; choose another place")
    return place


def _check_copies(source: Path, made: Mapping[Path, str], before: Stamps) -> None:
    """Check before any work that the other files can be copied and overwrite nothing."""
    if NOTE in before:
        raise BadCheckpoint(f"{source}: is what a run that was broken off has left")
    for path in _entries(source):
        if path.is_symlink() and not path.exists():
            raise BadCheckpoint(f"{path}: is a link to {path.readlink()}, which is not there")
    others = _others(source, made, before)
    for name in sorted(others):
        if not os.access(source / name, os.R_OK):
            raise BadCheckpoint(f"{source / name}: cannot be copied, it is not readable for this user")
    for file, name in made.items():
        if name in others:
            where = source / name
            raise BadCheckpoint(f"{where}: cannot be copied, {file.name} becomes a file of this name; move one of them")


def _copy_others(source: Path, place: Path, made: Mapping[Path, str], before: Stamps) -> None:
    """Copy the other files in their current state; copies of an earlier run may be stale or read-only."""
    for path in _files_in(place):
        if str(path.relative_to(place)) not in (*made.values(), NOTE):
            path.unlink()
    for name in sorted(_others(source, made, before)):
        shutil.copy2(source / name, place / name)
        copy_ownership(source / name, place / name)
        fsync_path(place / name)
    if (draft := place / BESIDE).is_dir():
        copy_ownership(source / BESIDE, draft)
        fsync_path(draft)


def _others(source: Path, made: Mapping[Path, str], before: Stamps) -> set[str]:
    return before.keys() - {str(file.relative_to(source)) for file in made}


def _files_in(place: Path) -> list[Path]:
    """Return the files of a working directory, with those in the draft head's folder."""
    found = [*place.iterdir(), *((place / BESIDE).iterdir() if (place / BESIDE).is_dir() else ())]
    return [path for path in found if path != place / BESIDE]


def _check_same(source: Path, before: Stamps) -> None:
    now = stamps_of(source)
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            what = "appeared" if name not in before else "disappeared" if name not in now else "changed"
            raise BadCheckpoint(f"{source / name}: {what} while the files beside it were read")


def _note_of(files: Sequence[Path], before: Stamps) -> Any:
    source = files[0].parent
    return {
        "source": str(source.resolve()),
        "files": [[name, *before.get(name, ())] for name in (str(path.relative_to(source)) for path in files)],
    }


def _begin(place: Path, note: Any) -> None:
    """Keep files of an earlier run of the same source; delete those of another source."""
    found = [path for path in _files_in(place) if not path.name.startswith(NOTE)]
    before = _read(place / NOTE)
    if found and before is None:
        raise BadCheckpoint(
            f"{place}: lies in the way, and does not say what it was made of; choose another place or move it"
        )
    if before != note:
        for path in found:
            path.unlink()
        if (place / BESIDE).is_dir():
            (place / BESIDE).rmdir()
        part = place / f"{NOTE}.part"
        with with_filename(part):
            part.write_text(json.dumps(note))
        # After a power failure a readable note only stands next to files of the source it names.
        fsync_path(part)
        fsync_path(place)
        os.replace(part, place / NOTE)
        fsync_path(place)


def _read(note: Path) -> Any:
    try:
        return json.loads(note.read_text())
    except (OSError, ValueError):
        return None
