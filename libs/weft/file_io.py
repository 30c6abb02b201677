"""Reads and writes small files and translates OSError: transient I/O errors become StorageUnavailable, others
BadCheckpoint.
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

from weft.errors import BadCheckpoint, StorageUnavailable
from weft.foreign_files import LFS_POINTER, dangling, foreign_content

TRANSIENT = {
    *(errno.EIO, errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE),
    # Errors of network file systems.
    *(errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNREFUSED, errno.ENOTCONN, errno.EHOSTDOWN),
    *(errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.EREMOTEIO, errno.ENOLINK),
}
"""Errors that a retry may cure; they say nothing about the file."""

MAX_SMALL_BYTES = 64 * 1024 * 1024
"""Limit for files that are read whole or copied from an object store; the largest tokenizers have 30 MB."""
MAX_DEPTH = 100


def to_weft_error(error: OSError, what: str) -> BadCheckpoint | StorageUnavailable:
    """Return the Weft exception for an OSError, with the same message."""
    return (StorageUnavailable if error.errno in TRANSIENT else BadCheckpoint)(f"{what}: {error.strerror or error}")


def format_os_error(error: OSError) -> str:
    """Return file and reason without the errno."""
    where = f"{error.filename}: " if error.filename is not None else ""
    return f"{where}{error.strerror}" if error.strerror else str(error)


@contextmanager
def os_errors_translated(what: str) -> Iterator[None]:
    """Translate an OSError inside the block. Raises BadCheckpoint or StorageUnavailable."""
    try:
        yield
    except OSError as error:
        raise to_weft_error(error, f"{error.filename or what}") from error


@contextmanager
def with_filename(path: Path) -> Iterator[None]:
    """Add `path` to an OSError of a write or fsync, which names no file. Raises OSError."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def path_exists(path: Path) -> bool:
    """True if `path` exists. `Path.exists` raises for some disk errors and hides others.

    Raises BadCheckpoint, also for a dangling link, or StorageUnavailable.
    """
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        if os.path.islink(path):
            raise BadCheckpoint(f"{path}: {dangling(path)}") from None
        return False
    except OSError as error:
        raise to_weft_error(error, f"{path}: not readable") from error
    return True


def open_regular(path: Path, flags: int = 0) -> int:
    """Open a regular file for reading.

    Raises OSError, also for a pipe, since opening one would block until a writer comes.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "not a regular file")


def read_small(path: Path) -> bytes:
    """Read a whole file that is not weights. Raises OSError, also above MAX_SMALL_BYTES and for a Git LFS pointer."""
    with open(open_regular(path), "rb") as file:
        content = file.read(MAX_SMALL_BYTES + 1)  # Also bounds a file that grows or reports no size.
    if len(content) > MAX_SMALL_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {MAX_SMALL_BYTES} bytes")
    if content.startswith(LFS_POINTER):
        raise OSError(errno.EINVAL, foreign_content(content))
    return content


def fsync_path(path: Path) -> None:
    """Wait until a file's data, or the names in a directory, are on disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with with_filename(path):
            os.fsync(fd)
    except OSError as error:
        # Some network file systems reject fsync of a directory; they keep names themselves.
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(fd)


def copy_ownership(source: Path, made: Path) -> None:
    """Copy owner, group and mode from `source`.

    A process that may not change the group keeps its own, which then gets the rights of others. Raises OSError.
    """
    wanted = source.stat()
    mode = stat.S_IMODE(wanted.st_mode)
    with suppress(OSError):
        os.chown(made, -1, wanted.st_gid)
    if made.stat().st_gid != wanted.st_gid:
        mode = mode & ~0o070 | (mode & 0o007) << 3
    made.chmod(mode)
    with suppress(OSError):
        os.chown(made, wanted.st_uid, -1)


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file.

    Raises BadCheckpoint if the file holds no object or is too large or too deep for any model; StorageUnavailable if
    the disk fails.
    """
    try:
        content = read_small(path)
        values = json.loads(content.decode("utf-8-sig"))
    except FileNotFoundError:
        raise BadCheckpoint(f"{path}: {dangling(path) if path.is_symlink() else 'no such file'}") from None
    except OSError as error:
        raise to_weft_error(error, f"{path}: not readable") from error
    except (ValueError, RecursionError) as error:
        what = foreign_content(content) or error
        raise BadCheckpoint(f"{path}: not readable as JSON: {what}") from error
    if _is_deep(values):  # json.dumps and repr recurse deeper than json.loads and could overflow the stack.
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
