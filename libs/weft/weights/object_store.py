"""Checkpoints in an object store (S3 and compatible stores, GCS, Azure), read as ranges of objects.

`local_model` mirrors the small files into a directory, where every process finds config and tokenizer. The loader
reads the weights from the store, a range at a time. Needs the extra `object-store`.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from datetime import timedelta
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.config import model_name
from weft.errors import BadCheckpoint, StorageUnavailable, WeftError
from weft.file_io import MAX_SMALL_BYTES, fsync_path, path_exists, read_small, to_weft_error
from weft.hub import HubName, fetch_model, hub_name
from weft.options import names_draft_head
from weft.weights.storage import Blob, LocalOrigin, Origin, Scratch
from weft_kernels.cache_dir import user_cache_dir

if TYPE_CHECKING:
    from obstore import GetOptions, ObjectMeta
    from obstore.store import ObjectStore

logger = logging.getLogger(__name__)
ORIGIN_FILE = "weft-origin.json"
"""File in a mirrored directory: URL of the store, and stamps of the copied files."""
SCHEMES = ("s3://", "gs://", "az://")
WEIGHTS_SUFFIXES = (".safetensors", ".weft", ".bin", ".pt", ".pth", ".ckpt", ".gguf")
NEEDED = (
    *("config.json", "generation_config.json", "model.safetensors.index.json", "chat_template.jinja"),
    *("tokenizer.json", "tokenizer_config.json", "tekken.json", "tiktoken.model"),
)
"""Files that define the model; they are copied even if they are large."""
REQUEST_SECONDS = "60s"
STORE_RETRIES = 4
STORE_RETRY_TIMEOUT = timedelta(seconds=20)
"""Total time of the client's retries after broken connections and store errors; callers may then retry."""
# Excludes 408 (timeout) and 429 (slow down). A bucket of another region redirects without a location.
_REFUSED = re.compile(r"status code: 4(?!08|29)\d\d|redirect without LOCATION")


def is_store_url(model: str) -> bool:
    """Return whether the setting is a URL of an object store."""
    return model.startswith(SCHEMES)


def with_local_model(
    environ: Mapping[str, str] = os.environ, fetch: Callable[[HubName], Path] = fetch_model
) -> Mapping[str, str]:
    """Return the settings with a local directory for each URL and each Hub name in WEFT_MODEL.

    `fetch` returns the snapshot of a Hub model. Raises BadCheckpoint, StorageUnavailable.
    """
    setting = environ.get("WEFT_MODEL", "")
    if is_store_url(setting) or hub_name(setting):
        directory = Path(fetched(setting, fetch))
        # Without a name, a directory called `version=3` would be parsed as NAME=DIR.
        name = environ.get("WEFT_MODEL_NAME") or (directory.name if is_store_url(setting) else model_name(directory))
        return {**environ, "WEFT_MODEL": str(directory), "WEFT_MODEL_NAME": name}
    if environ.get("WEFT_MODEL_NAME") or "=" not in setting or os.path.isdir(setting):
        return environ
    parts = [part.partition("=") for part in setting.split(",")]
    places = [f"{name}{equals}{fetched(place.strip(), fetch)}" for name, equals, place in parts]
    return {**environ, "WEFT_MODEL": ",".join(places)}


def with_local_draft(environ: Mapping[str, str], fetch: Callable[[HubName], Path] = fetch_model) -> Mapping[str, str]:
    """Return the settings with a local directory for a URL or a Hub name in WEFT_DRAFT.

    Raises BadCheckpoint, StorageUnavailable.
    """
    draft = environ.get("WEFT_DRAFT", "")
    return {**environ, "WEFT_DRAFT": str(fetched(draft, fetch))} if draft and names_draft_head(draft) else environ


def fetched(place: str, fetch: Callable[[HubName], Path] = fetch_model) -> Path | str:
    """Return a local directory for a URL or a Hub name, and any other text as it is.

    Raises BadCheckpoint, StorageUnavailable.
    """
    if is_store_url(place):
        return local_model(place)
    name = hub_name(place)
    return fetch(name) if name else place


def local_model(url: str, cache: Path | None = None) -> Path:
    """Return a directory with the current small files of the checkpoint at `url`.

    Its name is the last part of the URL. ORIGIN_FILE in it records where the weights are. Raises BadCheckpoint,
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
    """Copy files that changed in the store, and delete files that are gone there."""
    had = _stamps(directory)
    stamps = {}
    for name, meta in origin.objects().items():
        size = meta["size"]
        if name.endswith(WEIGHTS_SUFFIXES) or name == ORIGIN_FILE:
            continue
        if size > MAX_SMALL_BYTES and name not in NEEDED:
            logger.warning("left where it is: %s/%s, of %d bytes", origin, name, size)
            continue
        stamps[name] = list(origin.stamp(name))
        if had.get(name) != stamps[name] or not _is_whole(directory / name, size):
            _write(directory / name, origin.content(name))
    for gone in had.keys() - stamps.keys():
        with _cache_errors_translated(directory / gone):
            (directory / gone).unlink(missing_ok=True)
    if had != stamps or not is_remote(directory):
        _write(directory / ORIGIN_FILE, json.dumps({"url": url, "files": stamps}).encode())


def origin_of(directory: Path) -> Origin:
    """Return where the weights of a checkpoint directory are.

    For a mirrored directory the small files are refreshed first: new weights need their own config. Raises
    BadCheckpoint, StorageUnavailable.
    """
    if not is_remote(directory):
        return LocalOrigin(directory)
    try:
        url = str(json.loads(read_small(directory / ORIGIN_FILE))["url"])
        if not is_store_url(url):  # a forged file could point at any local file
            raise ValueError(f"{url!r} is no object store's")
    except OSError as error:
        raise to_weft_error(error, f"{directory / ORIGIN_FILE}: not readable") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadCheckpoint(f"{directory / ORIGIN_FILE}: no URL can be read: {error}") from error
    origin = ObjectOrigin(url)
    _copy_small_files(origin, url, directory)
    return origin


def is_remote(directory: Path) -> bool:
    """Return whether the weights of this directory are in a store. Raises BadCheckpoint, StorageUnavailable."""
    return path_exists(directory / ORIGIN_FILE)


def _stamps(directory: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_small(directory / ORIGIN_FILE))["files"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    # Ignore names that point outside this directory.
    return {name: stamp for name, stamp in found.items() if name and Path(name).name == name and name != ".."}


def _is_whole(path: Path, size: int) -> bool:
    """Return whether the copy has its full size; a power failure may leave an empty file."""
    with _cache_errors_translated(path), suppress(FileNotFoundError):
        return path.stat().st_size == size
    return False


def _write(path: Path, content: bytes) -> None:
    # Processes that start together fetch the same file; in containers they may have equal process IDs.
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
    """The objects directly below a URL. Credentials and endpoint come from the environment (AWS_* and others)."""

    def __init__(self, url: str) -> None:
        """Configure the store without a request. Raises BadCheckpoint, also for unusable settings."""
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
        self._objects: dict[str, ObjectMeta] = {}

    def objects(self) -> dict[str, ObjectMeta]:
        """List all objects by name, once; later calls reuse the listing, and files are read in its state."""
        from obstore import list_with_delimiter

        if not self._objects:
            with _store_errors_translated(self._url):
                found = list_with_delimiter(self._store)["objects"]
            self._objects = {meta["path"]: meta for meta in found if meta["path"]}  # a folder object has no name
        if not self._objects:
            raise BadCheckpoint(f"{self._url}: there is nothing at this URL")
        return self._objects

    def names(self) -> Set[str]:
        return self.objects().keys()

    def open(self, name: str, cached: bool = False) -> Blob:
        return ObjectBlob(self._store, f"{self}/{name}", self._object(name))

    def stamp(self, name: str) -> tuple[str, ...]:
        meta = self._object(name)
        return str(meta["size"]), meta["e_tag"] or str(meta["last_modified"])

    def content(self, name: str) -> bytes:
        """Read a whole object. Raises BadCheckpoint, StorageUnavailable."""
        blob = self.open(name)
        if blob.size_bytes > MAX_SMALL_BYTES:
            raise BadCheckpoint(f"{blob.name}: {blob.size_bytes} bytes are too many for a file that is not weights")
        return bytes(blob.read(0, blob.size_bytes, Scratch()))

    def _object(self, name: str) -> ObjectMeta:
        if name not in self.objects():
            raise BadCheckpoint(f"{self._url}/{name}: no such object")
        return self._objects[name]

    def __str__(self) -> str:
        return self._url


class ObjectBlob(Blob):
    """Ranges of one object; each read is a request.

    An object that was replaced or removed since the listing raises StorageUnavailable; a new listing shows its state.
    """

    def __init__(self, store: ObjectStore, name: str, meta: ObjectMeta) -> None:
        self._store = store
        self.name = name
        self._path = meta["path"]
        self._tag = meta["e_tag"] or ""
        self.size_bytes = meta["size"]

    def close(self) -> None:
        """Do nothing: connections belong to the store."""

    def read(self, offset: int, size: int, scratch: Scratch) -> memoryview:
        from obstore import get

        if offset + size > self.size_bytes:
            raise BadCheckpoint(f"{self.name}: truncated: it ends before byte {offset + size}")
        if not size:  # stores reject empty ranges
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
    """Translate errors of the store to one line of ours; `is_listed`: the object existed in the last listing."""
    from obstore.exceptions import BaseError, NotFoundError, PreconditionError

    try:
        yield
    except (BaseError, ValueError, OSError) as error:
        line = str(error).strip().partition("\n")[0]
        is_changed = is_listed and isinstance(error, (PreconditionError, NotFoundError, FileNotFoundError))
        if is_changed:
            raise StorageUnavailable(f"{where}: changed or removed since it was listed: {line}") from error
        raise _error_class(error)(f"{where}: {line}") from error


def _error_class(error: Exception) -> type[WeftError]:
    """Return BadCheckpoint if the store rejected the request, StorageUnavailable for network and store failures."""
    from obstore.exceptions import GenericError

    is_answer = isinstance(error, (FileNotFoundError, PermissionError)) or _REFUSED.search(str(error))
    return StorageUnavailable if isinstance(error, (GenericError, OSError)) and not is_answer else BadCheckpoint
