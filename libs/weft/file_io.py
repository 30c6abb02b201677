"""Reads and writes the small files of a checkpoint, and says what a file or directory is that belongs to none.

An OSError becomes StorageUnavailable if a retry may cure it, else BadCheckpoint. Names and first bytes tell foreign
files apart.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import stat
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from weft.errors import BadCheckpoint, StorageUnavailable

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


FIRST_BYTES = 512
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
AGAIN = "download it again"
HAS_NO_CONFIG = "has no config.json; it must be a checkpoint as Hugging Face ships them"
ONLY_GGUF = "has only GGUF files; make a checkpoint of one with `weft convert FILE`"
# First bytes of known files.
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
CONTENTS = (
    (LFS_POINTER, f"is a Git LFS pointer, not the file itself; run `git lfs pull`, or {AGAIN}"),
    (b"<!doctype html", f"is a web page (HTML), not the file; {AGAIN}, with a login where the site wants one"),
    (b"<html", f"is a web page (HTML), not the file; {AGAIN}, with a login where the site wants one"),
    (b"<?xml", f"is a server's answer in XML, not the file; {AGAIN}"),
    (b"gguf", "is a GGUF file; make a checkpoint of it with `weft convert FILE`"),
    (b"pk\x03\x04", "is a zip archive, as PyTorch writes; convert it to safetensors"),
    (b"\x80\x02", "is pickled, which can run code and is not read; convert it to safetensors"),
)
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
UNFINISHED = (".incomplete", ".part", ".crdownload", ".aria2", ".tmp")
VARIANT = re.compile(r"model\.(\w+)(-\d+-of-\d+)?\.safetensors(\.index\.json)?|model\.safetensors\.index\.(\w+)\.json")


def foreign_content(head: bytes) -> str | None:
    """Say what a file is by its first bytes; None if they are unknown."""
    if not head:
        return f"truncated: the file is empty; {AGAIN}"
    start = head[:FIRST_BYTES].lstrip().lower()
    return next((what for begin, what in CONTENTS if start.startswith(begin)), None)


def foreign_path(path: Path) -> str:
    """Say why this path is no checkpoint: it is no directory with a config.json."""
    if os.path.isdir(path):
        return _foreign_directory(path)
    if os.path.isfile(path):
        return _foreign_file(path)
    if os.path.islink(path):
        return dangling(path)
    if HUB_NAME.fullmatch(str(path)):
        advice = f"`weft pull {path}` downloads it and prints its directory"
        return f"is no directory; if it is a model of the Hugging Face Hub, {advice}"
    return "is no directory; name one with a checkpoint as Hugging Face ships them"


def dangling(path: Path) -> str:
    """Describe a dangling link; a Hub cache holds such links after an interrupted download."""
    return f"is a link to {os.readlink(path)}, which is not there; {AGAIN}"


def foreign_names(names: Set[str]) -> str | None:
    """Say what a directory without readable weights contains instead; None if that is unknown."""
    if "adapter_config.json" in names or any(name.startswith("adapter_model.") for name in names):
        return "is an adapter (LoRA, PEFT), not a model; merge it into its base model and save the result"
    if "model_index.json" in names:
        return "is a pipeline of diffusers, which makes pictures; Weft serves language models"
    if variant := _first(names, lambda name: VARIANT.fullmatch(name) is not None):
        return f"has only a variant of the weights ({variant}); rename its files to model.safetensors and the like"
    if ".gguf" in _suffixes(names):
        return ONLY_GGUF
    if "params.json" in names or any(name.startswith("consolidated.") for name in names):
        what = "has its weights in the format of its maker (params.json, consolidated.*)"
        then = "take the checkpoint in the format of Hugging Face (model*.safetensors)"
        return f"{what}; {then}, or try `weft convert DIR` on Mistral Large 3 and Small 4"
    if unfinished := _first(names, lambda name: name.endswith(UNFINISHED)):
        return f"has an unfinished download ({unfinished}); {AGAIN}"
    for suffixes, what in OTHERS.items():
        if _suffixes(names).intersection(suffixes):
            return f"has only weights of {what}, which Weft does not read; take the safetensors checkpoint"
    return None


OTHERS = {
    (".onnx", ".onnx_data"): "ONNX",
    (".npz",): "MLX or NumPy",
    (".h5", ".msgpack", ".tflite"): "TensorFlow or Flax",
    (".mlpackage", ".mlmodel"): "Core ML",
    (".engine", ".plan"): "TensorRT",
}


def _foreign_directory(path: Path) -> str:
    config = path / "config.json"
    if config.is_symlink():
        return f"config.json {dangling(config)}"
    names = {each.name for each in path.iterdir()}
    if "adapter_config.json" in names and (base := _base_model(path / "adapter_config.json")):
        return f"is an adapter (LoRA, PEFT) of {base}, not a model; merge it into that model and save the result"
    if what := foreign_names(names):
        return what
    if "modules.json" in names or "config_sentence_transformers.json" in names:
        return "has no config.json: it is a folder of sentence-transformers; name the folder of its transformer"
    if inner := _inner_model(path):
        return f"has no config.json, but {inner} has; name that directory"
    if pickled := _first(names, lambda name: name.endswith(PICKLE_SUFFIXES)):
        return f"has no config.json, and its weights ({pickled}) are pickled; name a checkpoint in safetensors"
    return HAS_NO_CONFIG if names else f"is an empty directory: it {HAS_NO_CONFIG}"


def _foreign_file(path: Path) -> str:
    if path.name == "config.json":
        return f"is a file; name its directory, {path.parent}"
    if path.suffix == ".gguf":
        return f"is a GGUF file; make a checkpoint of it with `weft convert {shlex.quote(str(path))}`"
    with path.open("rb") as file:
        what = foreign_content(file.read(FIRST_BYTES))
    return what or "is a file; name the directory with it and config.json"


def _base_model(path: Path) -> str:
    try:
        return str(json.loads(path.read_bytes()).get("base_model_name_or_path") or "")
    except (OSError, ValueError, AttributeError, RecursionError):
        return ""


def _inner_model(path: Path) -> Path | None:
    """Return the newest snapshot of a Hub cache, or the only subdirectory with a config.json."""
    snapshots = sorted(path.glob("snapshots/*/config.json"), key=lambda each: each.stat().st_mtime)
    inner = snapshots[-1:] or list(path.glob("*/config.json"))
    return inner[0].parent if len(inner) == 1 else None


def _suffixes(names: Iterable[str]) -> set[str]:
    return {os.path.splitext(name)[1] for name in names}


def _first(names: Iterable[str], is_wanted: Callable[[str], bool]) -> str:
    return next(filter(is_wanted, sorted(names)), "")
