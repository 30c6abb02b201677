"""One safetensors image of a checkpoint in host shared memory: found, written, held, removed.

An image is written to a file without a name, which gets its own when it is complete: what can be found is whole, and
a writer that is killed leaves nothing. Whoever serves it holds a shared lock on it; only an image that nobody else
holds is removed.
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
from weft.weights.header import TensorEntry, read_header
from weft.weights.image_layout import DIGEST_BYTES, FORMAT, image_layout, num_pieces, root_hash
from weft.weights.image_writer import free_bytes, shm_write_error, write_all
from weft.weights.load import Report, RunReader, files_reader, fill_image

logger = logging.getLogger(__name__)
SHARED_MEMORY = Path("/dev/shm")
ReaderWrapper = Callable[[RunReader], RunReader]
PUBLISH_TRIES, PUBLISH_PAUSE_SECONDS = 10, 0.01
"""Somebody who looks at a file of our name, or removes it, has it for microseconds."""
NO_UNNAMED_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)
_NAME = re.compile(r"weft-weights-[0-9a-f]{16}-[0-9a-f]{16}-\d+-\d+\.safetensors")


@dataclass(frozen=True, slots=True)
class Image:
    """A complete image, held by a shared lock for as long as `fd` is open."""

    name: str
    size_bytes: int
    weights_hash: str
    fd: int

    @property
    def path(self) -> Path:
        """Where it is, or was."""
        return SHARED_MEMORY / self.name

    def is_linked(self) -> bool:
        """Can others still open it by name."""
        return _is_same_file(self.path, self.fd)

    def close(self) -> None:
        """Let go; the file stays, to be found again."""
        os.close(self.fd)

    def release(self) -> None:
        """Let go; the last holder removes the file. Mappings of it stay valid."""
        if _try_lock(self.fd, fcntl.LOCK_EX) and self.is_linked():
            self.path.unlink(missing_ok=True)
        os.close(self.fd)


def image_path(name: str) -> Path:
    """The file of an image. Raises NotFound for anything but a bare name of ours."""
    if not _NAME.fullmatch(name):
        raise NotFound(f"{name!r} is not the name of a weights image")
    return SHARED_MEMORY / name


def image_name(checkpoint: Checkpoint) -> str:
    """Tells the directory first, then the state of its files, then the format: versions of Weft run side by side; then
    the user, since nobody can read, nor remove, another one's."""
    made_of = f"{checkpoint.directory_id}-{checkpoint.source_id}"
    return f"weft-weights-{made_of}-{FORMAT.rpartition('-')[2]}-{os.geteuid()}.safetensors"


def open_image_file(path: Path) -> int:
    """To read, and no other file that a link of that name leads to. Raises OSError."""
    return open_regular(path, os.O_NOFOLLOW)


def find_image(checkpoint: Checkpoint) -> Image | None:
    """The image of just these files, if an earlier run left it or another process serves it.

    Raises BadCheckpoint when another file has taken its name, StorageUnavailable when it cannot be read now.
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
            os.close(fd)  # and with it the lock that keeps the image
            raise
    os.close(fd)
    _remove_unheld(path)
    return None


def remove_stale(checkpoint: Checkpoint) -> list[str]:
    """Remove images of earlier states of this directory, and what broken-off writers left, unless somebody has them."""
    removed = []
    current = image_name(checkpoint)
    for path in SHARED_MEMORY.glob(f"weft-weights-{checkpoint.directory_id}-*"):
        if path.name != current and _remove_unheld(path):
            removed.append(path.name)
    return removed


def remove_abandoned(prefix: str = "weft-weights-") -> str:
    """Remove the oldest image that no service holds and no process maps; its name, or nothing where there is none."""
    for path in sorted(SHARED_MEMORY.glob(f"{prefix}*"), key=_made_at):
        if _remove_unheld(path, if_used=False):
            return path.name
    return ""


def write_image(checkpoint: Checkpoint, report: Report, num_threads: int, around: ReaderWrapper | None = None) -> Image:
    """Read the checkpoint into a new image and publish it; `around` may put another reader before that of the files.

    `report(num_bytes, file)` is called from reading threads after every piece; what it raises ends the reading.
    Raises BadCheckpoint, StorageUnavailable when files change meanwhile, Overloaded when shared memory is too small.
    """
    layout = image_layout(checkpoint)
    with _unpublished(image_name(checkpoint), layout.size_bytes) as (fd, place):
        with while_unchanged(checkpoint), files_reader(layout) as read:
            leaves = fill_image(fd, layout, around(read) if around else read, report, num_threads)
        weights_hash = root_hash(layout.entries, leaves)
        write_all(fd, layout.header(weights_hash, leaves), 0)
        return _publish(fd, place, checkpoint, weights_hash)


def _publish(fd: int, place: Path, checkpoint: Checkpoint, weights_hash: str) -> Image:
    """Under its name, or the one that another process published first."""
    path = image_path(image_name(checkpoint))
    for _ in range(PUBLISH_TRIES):
        try:
            os.link(place, path, src_dir_fd=fd, follow_symlinks=True)  # only with a directory does Python follow
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
    """Its tensors, and the digests of each one's pieces one after another. Raises BadCheckpoint."""
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
    if metadata.get("format") != FORMAT or not metadata.get("weights_hash"):
        raise BadCheckpoint(f"{path}: not of format {FORMAT}")
    return metadata["weights_hash"]


@contextmanager
def _unpublished(name: str, size: int) -> Iterator[tuple[int, Path]]:
    """A file of this size that vanishes unless it was given a name, and by what else it can be opened; held, so that
    nobody sweeps it away."""
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
    """Open, locked and empty; with a name of its own only where the file system knows no files without one."""
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
        # not by our process' number: those of several containers are the same
        path = SHARED_MEMORY / f"{name}.{secrets.token_hex(8)}.partial"
        fd = os.open(path, os.O_CREAT | os.O_EXCL | flags, 0o600)
        fcntl.flock(fd, fcntl.LOCK_SH)
        if _is_same_file(path, fd):
            return fd, path
        os.close(fd)  # swept away before it was locked


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
    """For as long as this open file, or a mapping made of it, exists."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 1, 0))


def is_mapped(fd: int) -> bool:
    """By anybody who opened the file on their own."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
    kind, *_ = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))
    return bool(kind != fcntl.F_UNLCK)
