"""A directory that is made whole or not at all: work goes on in `<target>.partial`, which a broken-off run leaves for
the next one of the same source, and takes the target's name at the end. Knows no format."""

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
from weft.weights.checkpoint_files import stamp_of

NOTE = ".weft-made-of.json"
"""In the directory at work: what it is made of, so that nothing of another source ever stays in it."""
Stamps = Mapping[str, tuple[str, ...]]
"""Of the files of a directory, by name; another one for a file that was written anew."""


def stamps_of(source: Path) -> Stamps:
    """Of all files there, not of folders. Raises OSError."""
    return {path.name: stamp_of(path.stat()) for path in source.iterdir() if path.is_file()}


@contextmanager
def atomic_directory(made: Mapping[Path, str], target: Path, before: Stamps) -> Iterator[Path]:
    """A directory to work in on files of one directory, the keys of `made`, whose values are the names of what becomes
    of them; it becomes `target`, with copies of all files that lie beside them.

    `before` is what the source was when it was first looked at. Raises BadCheckpoint, naming the file where one is
    another by the end: what was made may be half of an old checkpoint and half of a new one. OSError.
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
        place.chmod(0o700)  # whoever may read the source may read it when it is whole
        yield place
        _check_same(source, before)
        _copy_others(source, place, made, before)
        _check_same(source, before)
        copy_ownership(source, place)
        place.chmod(place.stat().st_mode | 0o700)  # as long as the note has to go
        # a name that outlives a power failure must not stand for files that do not
        fsync_path(place)
        os.replace(place, target)
        (target / NOTE).unlink()
        copy_ownership(source, target)
        fsync_path(target)
        fsync_path(target.parent)


@contextmanager
def _locked(place: Path) -> Iterator[None]:
    """Whatever name it gets meanwhile. Raises BadCheckpoint, OSError."""
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
    """A run of the same source that was broken off between its target's name and its end goes on too."""
    if _read(target / NOTE) != note or target.is_symlink():
        return
    with _locked(target):  # one that is about to end has it still
        if _read(target / NOTE) == note and not os.path.lexists(place := _partial(target)):
            os.replace(target, place)


def _partial(target: Path) -> Path:
    return target.with_name(target.name + ".partial")


def _place_for(target: Path, source: Path) -> Path:
    """Where the work goes on. Before there is any to lose: the target's name is free, and nothing is read there."""
    # a link to what is not there has its name too; `..` has one only once what is before it is there
    if os.path.lexists(target) or target.resolve().exists():
        raise BadCheckpoint(f"{target}: is there already; choose another place or remove it")
    if source in target.resolve().parents:
        raise BadCheckpoint(f"{target}: lies inside {source}")
    place = _partial(target)
    if place.resolve() in (source, *source.parents):
        raise BadCheckpoint(f"{target}: is made in {place}, and {source} lies there; choose another place")
    return place


def _check_copies(source: Path, made: Mapping[Path, str], before: Stamps) -> None:
    """Before there is work to lose: what else lies there can be copied, and over nothing."""
    if NOTE in before:
        raise BadCheckpoint(f"{source}: is what a run that was broken off has left")
    for path in sorted(source.iterdir()):
        if path.is_symlink() and not path.exists():
            raise BadCheckpoint(f"{path}: is a link to {path.readlink()}, which is not there")
    others = _others(made, before)
    for name in sorted(others):
        if not os.access(source / name, os.R_OK):
            raise BadCheckpoint(f"{source / name}: cannot be copied, it is not readable for this user")
    for file, name in made.items():
        if name in others:
            where = source / name
            raise BadCheckpoint(f"{where}: cannot be copied, {file.name} becomes a file of this name; move one of them")


def _copy_others(source: Path, place: Path, made: Mapping[Path, str], before: Stamps) -> None:
    """As they are now: what an earlier run copied may be gone from the source, and may be read-only."""
    for path in place.iterdir():
        if path.name not in (*made.values(), NOTE):
            path.unlink()
    for name in sorted(_others(made, before)):
        shutil.copy2(source / name, place / name)
        copy_ownership(source / name, place / name)
        fsync_path(place / name)


def _others(made: Mapping[Path, str], before: Stamps) -> set[str]:
    return before.keys() - {file.name for file in made}


def _check_same(source: Path, before: Stamps) -> None:
    now = stamps_of(source)
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            what = "came" if name not in before else "went" if name not in now else "was written anew"
            raise BadCheckpoint(f"{source / name}: {what} while the files beside it were read")


def _note_of(files: Sequence[Path], before: Stamps) -> Any:
    return {
        "source": str(files[0].parent.resolve()),
        "files": [[path.name, *before.get(path.name, ())] for path in files],
    }


def _begin(place: Path, note: Any) -> None:
    """Keep what an earlier run made of these very files; what one made of others goes."""
    found = [path for path in place.iterdir() if not path.name.startswith(NOTE)]
    before = _read(place / NOTE)
    if found and before is None:
        raise BadCheckpoint(
            f"{place}: lies in the way, and does not say what it was made of; choose another place or move it"
        )
    if before != note:
        for path in found:
            path.unlink()
        part = place / f"{NOTE}.part"
        with with_filename(part):
            part.write_text(json.dumps(note))
        # whatever a power failure leaves: a note that can be read, beside files of no other source than it names
        fsync_path(part)
        fsync_path(place)
        os.replace(part, place / NOTE)
        fsync_path(place)


def _read(note: Path) -> Any:
    try:
        return json.loads(note.read_text())
    except (OSError, ValueError):
        return None
