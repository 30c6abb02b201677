"""Disks: what their errors say of the files on them, which is nothing where these may be read the next time; and when
something is kept, and for whom. Knows no format.

JSON files that somebody else wrote: read whole, or refused by name.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from weft.errors import BadCheckpoint, Unreadable
from weft.foreign_files import LFS_POINTER, dangling, foreign_content

TRANSIENT = {
    *(errno.EIO, errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE),
    # of a file system on a network
    *(errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNREFUSED, errno.ENOTCONN, errno.EHOSTDOWN),
    *(errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.EREMOTEIO, errno.ENOLINK),
}
"""What says nothing of the file: asked for again, it may be read."""

MAX_SMALL_BYTES = 64 * 1024 * 1024
"""Of a file that is read whole, and of one that is copied from an object store; the largest tokenizers have 30 MB."""


def told(error: OSError, what: str) -> BadCheckpoint | Unreadable:
    """The error of ours that a disk's is, with the same words."""
    return (Unreadable if error.errno in TRANSIENT else BadCheckpoint)(f"{what}: {error.strerror or error}")


def in_words(error: OSError) -> str:
    """The file and the reason, without the error's number."""
    where = f"{error.filename}: " if error.filename is not None else ""
    return f"{where}{error.strerror}" if error.strerror else str(error)


@contextmanager
def telling(what: str) -> Iterator[None]:
    """An error of the system's inside is one of ours. Raises BadCheckpoint, Unreadable."""
    try:
        yield
    except OSError as error:
        raise told(error, f"{error.filename or what}") from error


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """A write and a sync do not say which file they were of; their errors do then. Raises OSError."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def is_there(path: Path) -> bool:
    """Is there anything of this name. `Path.exists` has errors of its own for some disks and hides those of others.

    Raises BadCheckpoint, also for a link that leads nowhere, and Unreadable.
    """
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        if os.path.islink(path):
            raise BadCheckpoint(f"{path}: {dangling(path)}") from None
        return False
    except OSError as error:
        raise told(error, f"{path}: not readable") from error
    return True


def open_regular(path: Path, flags: int = 0) -> int:
    """To read. Raises OSError, also for a pipe of that name, whose opening would wait for whoever writes to it."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "not a regular file")


def read_small(path: Path) -> bytes:
    """All of a file that is not weights. Raises OSError, also for one of more than MAX_SMALL_BYTES, or a pointer."""
    with open(open_regular(path), "rb") as file:
        content = file.read(MAX_SMALL_BYTES + 1)  # of a file that grows, or does not tell its size
    if len(content) > MAX_SMALL_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {MAX_SMALL_BYTES} bytes")
    if content.startswith(LFS_POINTER):
        raise OSError(errno.EINVAL, foreign_content(content))
    return content


def on_disk(path: Path) -> None:
    """Wait until what was written to a file, or which names a directory has, is kept."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with naming(path):
            os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # some file systems on a network keep names by themselves
            raise
    finally:
        os.close(fd)


def share_alike(source: Path, made: Path) -> None:
    """Owner, group and mode of `source`, so that it is for the same eyes. Who may not give it away keeps it, and its
    own group may then do what all may. Raises OSError."""
    wanted = source.stat()
    mode = stat.S_IMODE(wanted.st_mode)
    with suppress(OSError):
        os.chown(made, -1, wanted.st_gid)
    if made.stat().st_gid != wanted.st_gid:
        mode = mode & ~0o070 | (mode & 0o007) << 3
    made.chmod(mode)
    with suppress(OSError):
        os.chown(made, wanted.st_uid, -1)


MAX_DEPTH = 100


def read_object(path: Path) -> dict[str, Any]:
    """Raises BadCheckpoint for a file that holds no JSON object, or a larger or deeper one than any model needs,
    Unreadable where the disk fails."""
    try:
        content = read_small(path)
        values = json.loads(content.decode("utf-8-sig"))
    except FileNotFoundError:
        raise BadCheckpoint(f"{path}: {dangling(path) if path.is_symlink() else 'no such file'}") from None
    except OSError as error:
        raise told(error, f"{path}: not readable") from error
    except (ValueError, RecursionError) as error:
        what = foreign_content(content) or error
        raise BadCheckpoint(f"{path}: not readable as JSON: {what}") from error
    if _is_deep(values):  # who writes it, or shows it, has less room on the stack than we had
        raise BadCheckpoint(f"{path}: nested in more than {MAX_DEPTH} levels")
    if not isinstance(values, dict):
        raise BadCheckpoint(f"{path}: expected a JSON object, found {type(values).__name__}")
    return values


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        if not (level := list(chain.from_iterable(inner))):
            return False
    return True
