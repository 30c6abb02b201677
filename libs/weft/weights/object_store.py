"""Checkpoints in an object store (S3 and what speaks its language, GCS, Azure): ranges of objects instead of files.

`local_model` brings the small files here, so that every process finds config and tokenizer in a directory as usual; the
weights are read from the store, a range at a time, by whoever loads them. Needs the extra `object-store`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from datetime import timedelta
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.errors import BadCheckpoint, StorageUnavailable, WeftError
from weft.file_io import MAX_SMALL_BYTES, fsync_path, path_exists, read_small, to_weft_error
from weft.weights.checkpoint_files import Blob, LocalOrigin, Origin, Scratch, WeightsFile
from weft_kernels.cache_dir import user_cache_dir

if TYPE_CHECKING:
    from obstore import GetOptions, ObjectMeta
    from obstore.store import ObjectStore

logger = logging.getLogger(__name__)
ORIGIN_FILE = "weft-origin.json"
"""In a directory that was made from a store: its URL, and the stamps of the files that were copied."""
SCHEMES = ("s3://", "gs://", "az://")
WEIGHTS_SUFFIXES = (".safetensors", ".weft", ".bin", ".pt", ".pth", ".ckpt", ".gguf")
NEEDED = (
    *("config.json", "generation_config.json", "model.safetensors.index.json", "chat_template.jinja"),
    *("tokenizer.json", "tokenizer_config.json", "tiktoken.model"),
)
"""Without these, where the store has them, another model would be served; what else is there nobody reads."""
REQUEST_SECONDS = "60s"
STORE_RETRIES = 4
STORE_RETRY_TIMEOUT = timedelta(seconds=20)
"""Of the client itself, over broken connections and a store's own trouble; then our callers may try again."""
# neither "timeout" nor "slow down"; a bucket of another region leads elsewhere without saying where
_REFUSED = re.compile(r"status code: 4(?!08|29)\d\d|redirect without LOCATION")


def is_store_url(model: str) -> bool:
    """Does this name a place in an object store."""
    return model.startswith(SCHEMES)


def with_local_model(environ: Mapping[str, str] = os.environ) -> Mapping[str, str]:
    """The settings, with a directory in WEFT_MODEL wherever it has a URL. Raises BadCheckpoint, StorageUnavailable."""
    setting = environ.get("WEFT_MODEL", "")
    if "://" not in setting:
        return environ
    if is_store_url(setting):
        directory = local_model(setting)
        # without a name, a directory called `version=3` would be taken for NAME=DIR
        name = environ.get("WEFT_MODEL_NAME") or directory.name
        return {**environ, "WEFT_MODEL": str(directory), "WEFT_MODEL_NAME": name}
    parts = [part.partition("=") for part in setting.split(",")]
    places = [f"{name}{equals}{local_model(place) if is_store_url(place) else place}" for name, equals, place in parts]
    return {**environ, "WEFT_MODEL": ",".join(places)}


def local_model(url: str, cache: Path | None = None) -> Path:
    """A directory with the small files of the checkpoint at `url`, as they are there now.

    It has the name that the URL ends with, and ORIGIN_FILE, which says where the weights are. Raises BadCheckpoint,
    StorageUnavailable.
    """
    origin = ObjectOrigin(url)
    name = url.rstrip("/").rpartition("/")[2]
    directory = (cache or user_cache_dir() / "models") / blake2b(url.encode(), digest_size=8).hexdigest() / name
    with _cache_errors_translated(directory):
        directory.mkdir(parents=True, exist_ok=True)
    _copy_small_files(origin, url, directory)
    return directory


def _copy_small_files(origin: ObjectOrigin, url: str, directory: Path) -> None:
    """Those that are others in the store now; what is gone there goes here."""
    had = _stamps(directory)
    stamps = {}
    for file in origin.files():
        if file.name.endswith(WEIGHTS_SUFFIXES) or file.name == ORIGIN_FILE:
            continue
        if file.size_bytes > MAX_SMALL_BYTES and file.name not in NEEDED:
            logger.warning("left where it is: %s, of %d bytes", file, file.size_bytes)
            continue
        stamps[file.name] = list(file.stamp())
        if had.get(file.name) != stamps[file.name] or not _is_whole(directory / file.name, file.size_bytes):
            _write(directory / file.name, file.content())
    for gone in had.keys() - stamps.keys():
        with _cache_errors_translated(directory / gone):
            (directory / gone).unlink(missing_ok=True)
    if had != stamps or not is_remote(directory):
        _write(directory / ORIGIN_FILE, json.dumps({"url": url, "files": stamps}).encode())


def origin_of(directory: Path) -> Origin:
    """Where the weights of a checkpoint directory are. If that is a store, the small files in the directory are as they
    are there now: new weights want the config that came with them. Raises BadCheckpoint, StorageUnavailable.
    """
    if not is_remote(directory):
        return LocalOrigin(directory)
    try:
        url = str(json.loads(read_small(directory / ORIGIN_FILE))["url"])
        if not is_store_url(
            url
        ):  # files of this machine, or whatever else whoever made that file would like to have read
            raise ValueError(f"{url!r} is no object store's")
    except OSError as error:
        raise to_weft_error(error, f"{directory / ORIGIN_FILE}: not readable") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadCheckpoint(f"{directory / ORIGIN_FILE}: no URL can be read: {error}") from error
    origin = ObjectOrigin(url)
    _copy_small_files(origin, url, directory)
    return origin


def is_remote(directory: Path) -> bool:
    """Are the weights of this directory elsewhere. Raises BadCheckpoint, StorageUnavailable."""
    return path_exists(directory / ORIGIN_FILE)


def _stamps(directory: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_small(directory / ORIGIN_FILE))["files"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    # whoever wrote that file has no say in what lies elsewhere
    return {name: stamp for name, stamp in found.items() if name and Path(name).name == name and name != ".."}


def _is_whole(path: Path, size: int) -> bool:
    """A machine that lost its power may have kept the name and nothing behind it."""
    with _cache_errors_translated(path), suppress(FileNotFoundError):
        return path.stat().st_size == size
    return False


def _write(path: Path, content: bytes) -> None:
    # processes that start together fetch the same; in containers that share a cache they have the same number
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    with _cache_errors_translated(path):
        try:
            part.write_bytes(content)
            fsync_path(part)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


@contextmanager
def _cache_errors_translated(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise to_weft_error(error, f"{path}: cannot be kept here") from error


class ObjectOrigin(Origin):
    """The objects directly below a URL. Credentials and endpoint come from the environment, AWS_* and so on."""

    def __init__(self, url: str) -> None:
        """Raises BadCheckpoint, also for settings that no store can be asked with: nothing is asked of one yet."""
        try:
            from obstore.store import from_url
        except ImportError:
            raise BadCheckpoint(
                f"{url}: object stores need another library: pip install 'weft[object-store]'"
            ) from None
        self._url = url.rstrip("/")
        is_plain = any(os.environ.get(name, "").startswith("http://") for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT"))
        try:
            with _store_errors_translated(url):
                self._store = from_url(
                    self._url,
                    client_options={"timeout": REQUEST_SECONDS, "allow_http": is_plain},
                    retry_config={"max_retries": STORE_RETRIES, "retry_timeout": STORE_RETRY_TIMEOUT},
                )
        except StorageUnavailable as error:
            raise BadCheckpoint(str(error)) from error
        self._files: dict[str, ObjectFile] = {}

    def files(self) -> list[ObjectFile]:
        """Everything there, asked for once."""
        from obstore import list_with_delimiter

        if not self._files:
            with _store_errors_translated(self._url):
                found = list_with_delimiter(self._store)["objects"]
            for meta in found:
                if meta["path"]:  # the folder itself, where a console or a file system has made it, has no name
                    self._files[meta["path"]] = ObjectFile(self._store, self._url, meta)
        if not self._files:
            raise BadCheckpoint(f"{self._url}: there is nothing at this URL")
        return list(self._files.values())

    def names(self) -> Set[str]:
        return {file.name for file in self.files()}

    def file(self, name: str) -> WeightsFile:
        self.files()
        if name not in self._files:
            raise BadCheckpoint(f"{self._url}/{name}: no such object")
        return self._files[name]

    def __str__(self) -> str:
        return self._url


class ObjectFile(WeightsFile):
    """One object, as it was when its directory was listed."""

    def __init__(self, store: ObjectStore, url: str, meta: ObjectMeta) -> None:
        self.name = meta["path"]
        self._store = store
        self._url = url
        self.size_bytes = meta["size"]
        self._tag = meta["e_tag"] or ""
        self._stamp = (str(self.size_bytes), self._tag or str(meta["last_modified"]))

    def open(self, cached: bool = False) -> Blob:
        return ObjectBlob(self._store, str(self), self.name, self.size_bytes, self._tag)

    def content(self) -> bytes:
        """All of it. Raises BadCheckpoint, StorageUnavailable."""
        if self.size_bytes > MAX_SMALL_BYTES:
            raise BadCheckpoint(f"{self}: {self.size_bytes} bytes are too many for a file that is not weights")
        return bytes(self.open().read(0, self.size_bytes, Scratch()))

    def stamp(self) -> tuple[str, ...]:
        return self._stamp

    def __str__(self) -> str:
        return f"{self._url}/{self.name}"


class ObjectBlob(Blob):
    """Ranges of one object; each read is a request. One that was written anew, or is gone, since it was listed is
    StorageUnavailable: a list made now says what is there."""

    def __init__(self, store: ObjectStore, name: str, path: str, size: int, tag: str) -> None:
        self._store = store
        self.name = name
        self._path = path
        self._tag = tag
        self.size_bytes = size

    def close(self) -> None:
        """Connections belong to the store."""

    def read(self, offset: int, size: int, scratch: Scratch) -> memoryview:
        from obstore import get

        if offset + size > self.size_bytes:
            raise BadCheckpoint(f"{self.name}: truncated: it ends before byte {offset + size}")
        if not size:  # a range without bytes is an error to a store
            return memoryview(b"")
        with _store_errors_translated(self.name, is_listed=True):
            options: GetOptions = {"range": (offset, offset + size)}
            if self._tag:
                options["if_match"] = self._tag
            data = memoryview(get(self._store, self._path, options=options).bytes())
        if len(data) != size:
            raise StorageUnavailable(f"{self.name}: {len(data)} bytes came where {size} were asked for")
        return data


@contextmanager
def _store_errors_translated(where: str, is_listed: bool = False) -> Iterator[None]:
    """The store's errors as one line of ours; `is_listed`: of an object that was there just now."""
    from obstore.exceptions import BaseError, NotFoundError, PreconditionError

    try:
        yield
    except (BaseError, ValueError, OSError) as error:
        line = str(error).strip().partition("\n")[0]
        is_changed = is_listed and isinstance(error, (PreconditionError, NotFoundError, FileNotFoundError))
        if is_changed:
            raise StorageUnavailable(f"{where}: was written anew, or removed, since it was listed: {line}") from error
        raise _error_class(error)(f"{where}: {line}") from error


def _error_class(error: Exception) -> type[WeftError]:
    """A store that answers says what is wrong with the request; all else is the network, or the store itself."""
    from obstore.exceptions import GenericError

    is_answer = isinstance(error, (FileNotFoundError, PermissionError)) or _REFUSED.search(str(error))
    return StorageUnavailable if isinstance(error, (GenericError, OSError)) and not is_answer else BadCheckpoint
