"""Models by their name on the Hugging Face Hub: `ORG/REPO` or `ORG/REPO@REVISION`.

`huggingface_hub` asks the Hub and owns the cache, so HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE count. Weft
chooses the files, refuses models that it cannot serve before their weights are fetched, resumes interrupted downloads
and compares checksums.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import re
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from weft import log
from weft.errors import BadCheckpoint, StorageUnavailable, WeftError
from weft.file_io import HAS_NO_CONFIG, ONLY_GGUF, PICKLE_SUFFIXES, foreign_names
from weft.hub_cache import COMMIT, INDEX_FILE, CachedModel, small_files, weight_files
from weft.model.config import config_of
from weft.model.draft_config import is_draft_head
from weft.model.fields import read_json

logger = logging.getLogger(__name__)
NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>\w[\w.-]*(/\w[\w.-]*)*))?")
CONFIG_FILES = ("config.json", "hf_quant_config.json")
PARALLEL_FILES = 4
LOG_SECONDS = 10.0
Report = Callable[[int, int], None]
"""Receives the bytes that are there and the bytes of all files to fetch."""


@dataclass(frozen=True, slots=True)
class HubName:
    """A model on the Hub; `revision` is a branch, a tag or a commit."""

    repo: str
    revision: str = "main"

    def __str__(self) -> str:
        return self.repo if self.revision == "main" else f"{self.repo}@{self.revision}"


def hub_name(place: str) -> HubName | None:
    """Return the Hub's model of this name; None for anything else. A path that exists is a path."""
    match = NAME.fullmatch(place)
    if match is None or os.path.lexists(place):
        return None
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(match["repo"])
    except HFValidationError:  # too long, for example: the Hub can have no such model
        return None
    return HubName(match["repo"], match["revision"] or "main")


@dataclass(frozen=True, slots=True)
class _Listing:
    """The files of a commit: sizes of all, and SHA-256 of those that Git LFS stores."""

    commit: str
    sizes: Mapping[str, int | None]
    checksums: Mapping[str, str]


def fetch_model(
    name: HubName, report: Report | None = None, has_weights: bool = True, is_thorough: bool = False
) -> Path:
    """Return a snapshot with the files that Weft needs, after fetching the missing ones.

    `has_weights` false fetches what a gateway needs. `is_thorough` compares all checksums again. Makes no request if
    HF_HUB_OFFLINE is set, or if the revision is a commit with all files in the cache. Raises BadCheckpoint where the
    caller must change something, StorageUnavailable where a retry may help.
    """
    with _errors_explained(name):
        return _Fetch(name, report or _logged(name), has_weights, is_thorough).run()


def fetch_config(name: HubName) -> Path:
    """Return a snapshot that has at least the configuration files, after fetching them if the cache lacks them.

    For programs that read no tensors and no tokenizer. Errors as `fetch_model`.
    """
    with _errors_explained(name):
        return _Fetch(name, _logged(name), has_weights=False, is_thorough=False).run_config()


def cached_snapshot(name: HubName) -> Path:
    """Return the snapshot that is in the cache, without a request. Raises BadCheckpoint if it is not complete."""
    return _Fetch(name, _logged(name), has_weights=True, is_thorough=False).run_offline()


class _Fetch:
    """Finds and fetches the files of one model, for one call of `fetch_model`."""

    def __init__(self, name: HubName, report: Report, has_weights: bool, is_thorough: bool) -> None:
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name

        self._name = name
        self._report = report
        self._has_weights = has_weights
        self._is_thorough = is_thorough
        self._cache = Path(constants.HF_HUB_CACHE)
        self._is_offline = constants.is_offline_mode()
        self._model = CachedModel(self._cache / repo_folder_name(repo_id=name.repo, repo_type="model"))

    def run(self) -> Path:
        if self._is_offline:
            return self.run_offline()
        model, known = self._model, self._model.commit_of(self._name.revision)
        if known == self._name.revision and model.is_noted(known, self._has_weights) and self._is_whole(known):
            return model.snapshot(known)
        try:
            listing = self._list()
        except StorageUnavailable as error:
            if not known or model.missing(known, model.needed(known, self._has_weights)):
                raise
            logger.warning("hub unreachable, serving the cached snapshot model=%s error=%s", self._name, error)
            return self._cached(known)
        with self._locked():
            self._complete(listing)
            model.note_revision(self._name.revision, listing.commit)
        return model.snapshot(listing.commit)

    def run_offline(self) -> Path:
        return self._cached(self._model.commit_of(self._name.revision))

    def run_config(self) -> Path:
        """Return the cached snapshot if it has config.json, else fetch it and hf_quant_config.json."""
        known = self._model.commit_of(self._name.revision)
        if known and not self._model.missing(known, ["config.json"]):
            return self._model.snapshot(known)
        if self._is_offline:
            return self._cached(known)
        listing = self._list()
        self._check_config(listing)
        with self._locked():
            for file in CONFIG_FILES:
                if file in listing.sizes:
                    self._fetch_small(listing, file)
            # A snapshot with weights keeps the revision: it serves without a network.
            if not known:
                self._model.note_revision(self._name.revision, listing.commit)
        return self._model.snapshot(listing.commit)

    def _check_config(self, listing: _Listing) -> None:
        """Raise BadCheckpoint if the model has no config.json."""
        names = set(listing.sizes)
        if "config.json" not in names:
            raise BadCheckpoint(f"{self._name}: {_foreign(self._name, names) or HAS_NO_CONFIG}")

    def _is_whole(self, commit: str) -> bool:
        sizes = self._model.needed(commit, self._has_weights)
        return not (self._model.missing(commit, sizes) or self._model.damaged(commit, sizes, self._is_thorough))

    def _cached(self, commit: str) -> Path:
        """Return the snapshot without a request. Raises BadCheckpoint for a missing or damaged file."""
        advice = f"run `weft pull {self._name}` with a network, and without HF_HUB_OFFLINE"
        snapshot = self._model.snapshot(commit)
        if not commit or not snapshot.is_dir():
            raise BadCheckpoint(f"{self._name}: the cache {self._cache} does not have it; {advice}")
        sizes = self._model.needed(commit, self._has_weights)
        if missing := self._model.missing(commit, sizes):
            raise BadCheckpoint(f"{self._name}: {snapshot} lacks {_listed(missing)}; {advice}")
        if bad := self._model.damaged(commit, sizes, self._is_thorough):
            raise BadCheckpoint(f"{self._name}: {_listed(bad)} in {snapshot} has a wrong checksum; {advice}")
        return snapshot

    def _list(self) -> _Listing:
        """Ask the Hub for the commit and its files: one request."""
        from huggingface_hub import HfApi

        with _errors_explained(self._name):
            info = HfApi(library_name="weft").model_info(
                self._name.repo, revision=self._name.revision, files_metadata=True
            )
        files = info.siblings or []
        commit = info.sha or ""
        if not COMMIT.fullmatch(commit):
            raise BadCheckpoint(f"{self._name}: the Hub's answer names no commit; check HF_ENDPOINT")
        checksums = {each.rfilename: each.lfs.sha256 for each in files if each.lfs is not None}
        return _Listing(commit, {each.rfilename: each.size for each in files}, checksums)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Let one process at a time fetch this model; the next one finds its files."""
        from huggingface_hub.utils import WeakFileLock

        lock = self._cache / ".locks" / self._model.folder.name / "weft.lock"
        if os.path.isdir(self._cache) and not os.access(self._cache, os.W_OK):
            yield  # read-only: there is nothing to write to
            return
        lock.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock):
            yield

    def _complete(self, listing: _Listing) -> None:
        """Fetch what is missing and compare checksums; a damaged file is fetched again, once."""
        commit, wanted = listing.commit, dict[str, int | None]()
        for attempt in range(2):
            wanted = self._fetch_missing(listing)
            bad = self._model.damaged(commit, wanted, self._is_thorough and not attempt)
            if not bad:
                self._model.note_files(commit, wanted)
                return
            logger.warning("checksum wrong, fetching again model=%s files=%s", self._name, ",".join(bad))
            self._model.remove(commit, bad)
        raise BadCheckpoint(
            f"{self._name}: {_listed(bad)} has a wrong checksum after a second download; check proxy and disk"
        )

    def _fetch_missing(self, listing: _Listing) -> dict[str, int | None]:
        """Fetch the missing files. Returns the sizes of all that Weft needs."""
        snapshot = self._model.snapshot(listing.commit)
        names = listing.sizes.keys()
        self._check_config(listing)
        self._fetch_small(listing, "config.json")
        if not is_draft_head(fields := read_json(snapshot / "config.json")):
            config_of(fields)  # before gigabytes are fetched
        index = [INDEX_FILE] if INDEX_FILE in names and "model.safetensors" not in names and self._has_weights else []
        small = [*small_files(names), *index]
        for each in small:
            self._fetch_small(listing, each)
        weights = weight_files(names, snapshot / INDEX_FILE) if self._has_weights else []
        if self._has_weights and not weights:
            raise BadCheckpoint(f"{self._name}: {_without_weights(self._name, names)}")
        if absent := [each for each in weights if each not in names]:
            raise BadCheckpoint(f"{self._name}: {INDEX_FILE} names {_listed(absent)}, which the Hub does not have")
        self._fetch_weights(listing, self._model.missing(listing.commit, weights))
        return {each: listing.sizes[each] for each in (*small, *weights)}

    def _fetch_small(self, listing: _Listing, file: str) -> None:
        """Fetch a file or link its blob, unless the snapshot has it."""
        from huggingface_hub import hf_hub_download
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
        # The write that fails reports a full disk, in one line.
        warnings.filterwarnings("ignore", "Not enough free disk space")
        if self._model.missing(listing.commit, [file]):
            hf_hub_download(self._name.repo, file, revision=listing.commit, library_name="weft")

    def _fetch_weights(self, listing: _Listing, files: list[str]) -> None:
        """Fetch files in parallel. The first error, or Ctrl-C, ends all of them."""
        sizes = {file: listing.sizes[file] or 0 for file in files}
        parts = {file: self._part(listing, file) for file in files}
        done = sum(part.stat().st_size for part in parts.values() if part is not None and part.exists())
        total = sum(sizes.values())
        self._check_space(total - done)
        counter = _Counter(self._report, done, total)
        waiting, ended = SimpleQueue[str](), SimpleQueue[BaseException | None]()
        for file in files:
            waiting.put(file)

        def fetch_each() -> None:
            with suppress(Empty):
                while True:
                    ended.put(self._outcome(listing, waiting.get_nowait(), parts, counter))

        try:
            # Daemon threads: a pool would wait at exit for a server that sends nothing.
            for _ in files[:PARALLEL_FILES]:
                threading.Thread(target=fetch_each, daemon=True).start()
            for _ in files:
                if error := ended.get():
                    raise error
        finally:
            counter.stop()

    def _outcome(
        self, listing: _Listing, file: str, parts: Mapping[str, Path | None], counter: _Counter
    ) -> BaseException | None:
        try:
            self._fetch_blob(listing, file, parts[file], counter)
        except BaseException as error:
            return error
        return None

    def _part(self, listing: _Listing, file: str) -> Path | None:
        """Return where the beginning of a file is kept; None for a file that Git stores."""
        checksum = listing.checksums.get(file)
        return self._model.folder / "blobs" / f"{checksum}.incomplete" if checksum else None

    def _fetch_blob(self, listing: _Listing, file: str, part: Path | None, counter: _Counter) -> None:
        """Continue a partial download. `huggingface_hub` starts again after its process ended."""
        from huggingface_hub import constants, hf_hub_url
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import WeakFileLock, build_hf_headers

        size = listing.sizes[file] or 0
        if part is None or not size or size > constants.MAX_HTTP_DOWNLOAD_SIZE:
            self._fetch_small(listing, file)
            counter.add(size)
            return
        blob = part.with_suffix("")
        part.parent.mkdir(parents=True, exist_ok=True)
        # The lock of `huggingface_hub`: other programs may fetch the same file.
        with WeakFileLock(self._cache / ".locks" / self._model.folder.name / f"{blob.name}.lock"):
            if not blob.exists():
                with _CountedWriter(part, counter) as target:
                    if (have := target.seek(0, io.SEEK_END)) > size:
                        target.truncate(target.seek(0))
                        have = 0
                    url = hf_hub_url(self._name.repo, file, revision=listing.commit)
                    headers = build_hf_headers(library_name="weft")
                    http_get(url, target, resume_size=have, headers=headers, expected_size=size)
                os.replace(part, blob)
        self._fetch_small(listing, file)

    def _check_space(self, num_bytes: int) -> None:
        folder = next(each for each in (self._model.folder, *self._model.folder.parents) if each.exists())
        if num_bytes > (free := shutil.disk_usage(folder).free):
            raise BadCheckpoint(
                f"{self._name}: {num_bytes / 1e9:.1f} GB are missing and {self._cache} has {free / 1e9:.1f} GB free; "
                "delete models there, or set HF_HOME to a directory on a larger disk"
            )


class _Stopped(Exception):
    """Another file failed, or the user pressed Ctrl-C."""


class _Counter:
    """Counts the bytes of all files that are fetched in parallel."""

    def __init__(self, report: Report, done: int, total: int) -> None:
        self._report, self._done, self._total = report, done, total
        self._lock = threading.Lock()
        self._is_stopped = False
        if total:
            report(done, total)

    def add(self, num_bytes: int) -> None:
        """Count bytes. Raises _Stopped after `stop`."""
        if self._is_stopped:
            raise _Stopped
        with self._lock:
            self._done += num_bytes
            self._report(self._done, self._total)

    def stop(self) -> None:
        self._is_stopped = True


class _CountedWriter(io.BufferedRandom):
    """A file that is continued at its end; it reports the bytes written."""

    def __init__(self, path: Path, counter: _Counter) -> None:
        super().__init__(io.FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+"))
        self._counter = counter

    def write(self, data: Any) -> int:
        written = super().write(data)
        self._counter.add(written)
        return written


def _logged(name: HubName) -> Report:
    """Return a report that logs every 10 s."""
    logged_at = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal logged_at
        if time.monotonic() - logged_at >= LOG_SECONDS:
            logged_at = time.monotonic()
            log.progress(f"download of {name}", done, total)

    return report


def _foreign(name: HubName, names: Collection[str]) -> str | None:
    what = foreign_names(set(names))
    return f"{what} after `hf download {name.repo} FILE`" if what == ONLY_GGUF else what


def _without_weights(name: HubName, names: Collection[str]) -> str:
    if what := _foreign(name, names):
        return what
    if any(each.endswith(PICKLE_SUFFIXES) for each in names):
        return "has only pickled weights, which can run code; convert them to safetensors"
    return "has no model.safetensors and no model.safetensors.index.json; choose a model with safetensors"


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more}"


@contextmanager
def _errors_explained(name: HubName) -> Iterator[None]:
    """Translate errors of `huggingface_hub` into one line. Raises BadCheckpoint, StorageUnavailable."""
    import httpx2
    from huggingface_hub import constants
    from huggingface_hub import errors as hub

    at = constants.ENDPOINT
    try:
        yield
    except WeftError:
        raise
    except hub.GatedRepoError:
        advice = f"accept its terms at {at}/{name.repo}, then set HF_TOKEN to a token of that account"
        raise BadCheckpoint(f"{name}: the model is gated; {advice}") from None
    except hub.RevisionNotFoundError:
        raise BadCheckpoint(f"{name}: {name.repo} has no revision {name.revision!r}; see {at}/{name.repo}") from None
    except hub.RepositoryNotFoundError:
        what = f"no directory here and no public model at {at}"
        raise BadCheckpoint(f"{name}: {what}; check the name, or set HF_TOKEN for a private one") from None
    except (hub.LocalEntryNotFoundError, httpx2.TransportError) as error:
        cause = error.__cause__ or error
        what = f"{at} cannot be reached ({_first_line(cause)})"
        raise StorageUnavailable(f"{name}: {what}; check network and HF_ENDPOINT, or name a directory") from error
    except hub.HfHubHTTPError as error:
        raise _refused(name, error.response.status_code, at) from error
    except OSError as error:
        raise _unwritten(name, error, constants.HF_HUB_CACHE) from error


def _unwritten(name: HubName, error: OSError, cache: str) -> WeftError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        advice = "delete models there, or set HF_HOME to a directory on a larger disk"
        return BadCheckpoint(f"{name}: the disk of {cache} is full; {advice}")
    if error.errno == errno.EFBIG:
        advice = "raise `ulimit -f`, or set HF_HOME to a directory on another file system"
        return BadCheckpoint(f"{name}: {cache}: {error.strerror}; {advice}")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        where = error.filename or cache
        return BadCheckpoint(f"{name}: {where}: {error.strerror}; set HF_HOME to a directory of yours")
    return StorageUnavailable(f"{name}: the download failed ({_first_line(error)}); start it again, it continues")


def _refused(name: HubName, status: int, at: str) -> WeftError:
    if status in (401, 403):
        advice = "set it to a valid token that may read this model, or unset it"
        return BadCheckpoint(f"HF_TOKEN: {at} refuses it for {name} (HTTP {status}); {advice}")
    if status == 429 or status >= 500:
        return StorageUnavailable(f"{name}: {at} answers HTTP {status}; start the download again later, it continues")
    return BadCheckpoint(f"{name}: {at} answers HTTP {status}; check the name and HF_ENDPOINT")


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
