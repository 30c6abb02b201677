"""The safetensors image of a checkpoint in host shared memory: find, write, hold, remove.

A writer fills an unnamed file and links it when it is complete: every visible image is complete, and a killed writer
leaves nothing. A service holds its image by a shared flock; only an image without other holders is removed.
A process that maps an image marks it with an open-file-description lock, which lasts as long as the mapping and does
not conflict with flock.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from weft.errors import BadCheckpoint, NotFound, Overloaded
from weft.file_io import open_regular, to_weft_error
from weft.weights.checkpoint import Checkpoint, while_unchanged
from weft.weights.formats import RunReader, TensorEntry
from weft.weights.load import (
    DIGEST_BYTES,
    IMAGE_FORMAT,
    Report,
    files_reader,
    fill_image,
    free_bytes,
    image_layout,
    num_pieces,
    root_hash,
    shm_write_error,
    write_all,
)
from weft.weights.safetensors import read_header

logger = logging.getLogger(__name__)
SHARED_MEMORY = Path("/dev/shm")
ReaderWrapper = Callable[[RunReader], RunReader]
PUBLISH_TRIES, PUBLISH_PAUSE_SECONDS = 10, 0.01
"""Another process that inspects or removes a file of our name holds it for microseconds."""
NO_UNNAMED_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)
_NAME = re.compile(r"weft-weights-[0-9a-f]{16}-[0-9a-f]{16}-\d+-\d+\.safetensors")


@dataclass(frozen=True, slots=True)
class Image:
    """A complete image, held by a shared lock while `fd` is open."""

    name: str
    size_bytes: int
    weights_hash: str
    fd: int

    @property
    def path(self) -> Path:
        """Path of the image while it is linked."""
        return SHARED_MEMORY / self.name

    def is_linked(self) -> bool:
        """Return whether other processes can still open the image by name."""
        return _is_same_file(self.path, self.fd)

    def close(self) -> None:
        """Stop holding the image, and leave the file for later use."""
        os.close(self.fd)

    def release(self) -> None:
        """Stop holding the image; the last holder removes the file. Existing mappings stay valid."""
        if _try_lock(self.fd, fcntl.LOCK_EX) and self.is_linked():
            self.path.unlink(missing_ok=True)
        os.close(self.fd)


def image_path(name: str) -> Path:
    """Return the file of an image. Raises NotFound for anything but a bare image name."""
    if not _NAME.fullmatch(name):
        raise NotFound(f"{name!r} is not the name of a weights image")
    return SHARED_MEMORY / name


def image_name(checkpoint: Checkpoint) -> str:
    """Return the name: directory ID, state of its files, format version, user ID.

    Versions of Weft run side by side, and a user cannot read or remove the images of another.
    """
    made_of = f"{checkpoint.directory_id}-{checkpoint.source_id}"
    return f"weft-weights-{made_of}-{IMAGE_FORMAT.rpartition('-')[2]}-{os.geteuid()}.safetensors"


def open_image_file(path: Path) -> int:
    """Open an image for reading without following links. Raises OSError."""
    return open_regular(path, os.O_NOFOLLOW)


def find_image(checkpoint: Checkpoint) -> Image | None:
    """Return the image of exactly these files, if an earlier run left it or another process serves it.

    Raises BadCheckpoint if another kind of file has the name, StorageUnavailable if it cannot be read for the moment.
    """
    path = image_path(image_name(checkpoint))
    try:
        fd = open_image_file(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise to_weft_error(error, f"{path} is in the way") from error
    about = os.fstat(fd)
    if about.st_uid == os.geteuid() and _try_lock(fd, fcntl.LOCK_SH) and _is_same_file(path, fd):
        try:
            return Image(path.name, about.st_size, _read_hash(path), fd)
        except BadCheckpoint as error:
            logger.warning("not an image of ours: %s", error)
        except BaseException:
            os.close(fd)  # also releases the lock that keeps the image
            raise
    os.close(fd)
    _remove_unheld(path)
    return None


def remove_stale(checkpoint: Checkpoint) -> list[str]:
    """Remove unheld images of earlier states of this directory, and remains of killed writers."""
    removed = []
    current = image_name(checkpoint)
    for path in SHARED_MEMORY.glob(f"weft-weights-{checkpoint.directory_id}-*"):
        if path.name != current and _remove_unheld(path):
            removed.append(path.name)
    return removed


def remove_abandoned(prefix: str = "weft-weights-") -> str:
    """Remove the oldest image that no service holds and no process maps; return its name, or an empty string."""
    for path in sorted(SHARED_MEMORY.glob(f"{prefix}*"), key=_made_at):
        if _remove_unheld(path, if_used=False):
            return path.name
    return ""


def write_image(checkpoint: Checkpoint, report: Report, num_threads: int, around: ReaderWrapper | None = None) -> Image:
    """Read the checkpoint into a new image and publish it; `around` may wrap the reader of the files.

    Reading threads call `report(num_bytes, file)` after every piece; an exception from it ends the reading.
    Raises BadCheckpoint, StorageUnavailable if files change meanwhile, Overloaded if shared memory is too small.
    """
    layout = image_layout(checkpoint)
    with _unpublished(image_name(checkpoint), layout.size_bytes) as (fd, place):
        with while_unchanged(checkpoint), files_reader(layout) as read:
            leaves = fill_image(fd, layout, around(read) if around else read, report, num_threads)
        weights_hash = root_hash(layout.entries, leaves)
        write_all(fd, layout.header(weights_hash, leaves), 0)
        return _publish(fd, place, checkpoint, weights_hash)


def _publish(fd: int, place: Path, checkpoint: Checkpoint, weights_hash: str) -> Image:
    """Link the image under its name, or return the one that another process published first."""
    path = image_path(image_name(checkpoint))
    for _ in range(PUBLISH_TRIES):
        try:
            # Python follows links only if a directory is given.
            os.link(place, path, src_dir_fd=fd, follow_symlinks=True)
        except FileExistsError:
            if (image := find_image(checkpoint)) is not None:
                logger.info("another process published %s first", path.name)
                return image
            time.sleep(PUBLISH_PAUSE_SECONDS)
        except OSError as error:
            raise shm_write_error(error) from error
        else:
            return Image(path.name, os.fstat(fd).st_size, weights_hash, os.dup(fd))
    raise BadCheckpoint(f"{path} is in the way and is not an image of ours")


def image_content(image: Image) -> tuple[tuple[TensorEntry, ...], dict[str, bytes]]:
    """Return the tensors of an image and the piece digests of each. Raises BadCheckpoint."""
    header = read_header(image.path)
    digests = bytes.fromhex(header.metadata["leaves"])
    leaves, done = {}, 0
    for entry in header.tensors:
        size = DIGEST_BYTES * num_pieces(entry)
        leaves[entry.name] = digests[done : done + size]
        done += size
    return header.tensors, leaves


def _read_hash(path: Path) -> str:
    metadata = read_header(path).metadata
    if metadata.get("format") != IMAGE_FORMAT or not metadata.get("weights_hash"):
        raise BadCheckpoint(f"{path}: not of format {IMAGE_FORMAT}")
    return metadata["weights_hash"]


@contextmanager
def _unpublished(name: str, size: int) -> Iterator[tuple[int, Path]]:
    """Yield a file of `size` bytes and a path that opens it; it disappears unless it is linked.

    The file is locked, so that no other process removes it as a remainder.
    """
    try:
        fd, partial = _new_file(name)
    except OSError as error:
        raise shm_write_error(error) from error
    try:
        if (free := free_bytes(SHARED_MEMORY)) < size:
            raise Overloaded(f"{SHARED_MEMORY}: no room: {size} bytes needed, {free} free")
        os.truncate(fd, size)
        yield fd, partial or Path(f"/proc/self/fd/{fd}")
    finally:
        if partial is not None:
            partial.unlink(missing_ok=True)
        os.close(fd)


def _new_file(name: str) -> tuple[int, Path | None]:
    """Create an open, locked, empty file; it has a name only if the file system lacks unnamed files."""
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        fd = os.open(SHARED_MEMORY, os.O_TMPFILE | flags, 0o600)
    except OSError as error:
        if error.errno not in NO_UNNAMED_FILES:
            raise
    else:
        fcntl.flock(fd, fcntl.LOCK_SH)
        return fd, None
    while True:
        # A random name: process IDs of several containers may be equal.
        path = SHARED_MEMORY / f"{name}.{secrets.token_hex(8)}.partial"
        fd = os.open(path, os.O_CREAT | os.O_EXCL | flags, 0o600)
        fcntl.flock(fd, fcntl.LOCK_SH)
        if _is_same_file(path, fd):
            return fd, path
        os.close(fd)  # removed before it was locked


def _made_at(path: Path) -> float:
    try:
        return path.stat(follow_symlinks=False).st_mtime
    except FileNotFoundError:
        return 0.0


def _remove_unheld(path: Path, if_used: bool = True) -> bool:
    try:
        fd = open_image_file(path)
    except OSError:
        return False
    try:
        is_ours = os.fstat(fd).st_uid == os.geteuid()
        is_free = if_used or not is_mapped(fd)
        if is_ours and is_free and _try_lock(fd, fcntl.LOCK_EX) and _is_same_file(path, fd):
            path.unlink(missing_ok=True)
            return True
        return False
    finally:
        os.close(fd)


def _try_lock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_same_file(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(path.stat(follow_symlinks=False), os.fstat(fd))
    except FileNotFoundError:
        return False


_FLOCK = struct.Struct("hhqqi4x")  # type, whence, start, length, process; 64-bit Linux


def mark_mapped(fd: int) -> None:
    """Mark the image as in use while this open file, or a mapping of it, exists."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 1, 0))


def is_mapped(fd: int) -> bool:
    """Return whether another open of the file has marked it as in use."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
    kind, *_ = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))
    return bool(kind != fcntl.F_UNLCK)
