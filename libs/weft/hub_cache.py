"""One model in the cache of the Hugging Face Hub: the files it needs, the missing ones and the damaged ones.

The layout is that of `huggingface_hub`: `models--ORG--REPO` with `refs`, `snapshots` and `blobs`. A blob is named after
its content: with the SHA-256 of a large file, with Git's SHA-1 of a small one. So damage is found without a network.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import BadCheckpoint
from weft.file_io import os_errors_translated, read_json_object
from weft.tekken import TEKKEN
from weft.tokenizer import RANKS, TOKENIZER

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TOKENIZERS = (TOKENIZER, TEKKEN, RANKS)
SMALL_FILES = (
    *("config.json", "generation_config.json", "hf_quant_config.json", "chat_template.jinja"),
    *("tokenizer_config.json", "special_tokens_map.json", *TOKENIZERS),
)
"""Files that Weft reads in addition to weights, config.json first; see `small_files`."""
RECORD_FILE = "weft.json"
"""File in a model's folder: needed files by commit with their sizes, and blobs with a compared checksum."""
COMMIT = re.compile(r"[0-9a-f]{40}")
BLOB_NAME = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
READ_BYTES = 1 << 20


def small_files(names: Collection[str]) -> list[str]:
    """Return the small files that Weft reads of these; tokenizer.json replaces tekken.json."""
    return [each for each in SMALL_FILES if each in names and (each != TEKKEN or TOKENIZER not in names)]


def weight_files(names: Collection[str], index: Path) -> list[str]:
    """Return the weight files that Weft reads: the single file if there is one, else those of the index.

    A bundle replaces a missing safetensors file. Raises BadCheckpoint for a wrong index, StorageUnavailable.
    """
    if (single := _stored_name(SINGLE_FILE, names)) in names:
        return [single]
    if INDEX_FILE not in names:
        return []
    files = read_json_object(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(each, str) and is_plain(each) for each in files.values()):
        raise BadCheckpoint(f"{index}: weight_map: expected names of files in this directory")
    return [_stored_name(each, names) for each in sorted(set(files.values()))]


def is_plain(name: str) -> bool:
    """Return whether this names a file directly below a directory."""
    return Path(name).name == name and name not in ("", "..")


def _stored_name(name: str, names: Collection[str]) -> str:
    bundle = f"{name.removesuffix('.safetensors')}.weft"
    return bundle if name not in names and bundle in names else name


@dataclass(frozen=True, slots=True)
class CachedModel:
    """The folder of one model in the cache; it may not exist yet."""

    folder: Path

    def snapshot(self, commit: str) -> Path:
        """Return the directory with the files of a commit."""
        return self.folder / "snapshots" / commit

    def commit_of(self, revision: str) -> str:
        """Return the commit that a branch or tag had when it was fetched last; empty if it never was."""
        if COMMIT.fullmatch(revision):
            return revision
        with suppress(OSError, UnicodeDecodeError):
            return (self.folder / "refs" / revision).read_text().strip()
        return ""

    def note_revision(self, revision: str, commit: str) -> None:
        """Record the commit of a branch or tag. Raises BadCheckpoint, StorageUnavailable."""
        if revision != commit and self.commit_of(revision) != commit:
            self._write(self.folder / "refs" / revision, commit)

    def needed(self, commit: str, has_weights: bool = True) -> dict[str, int | None]:
        """Return the files that Weft needs and their sizes, where known.

        They come from the record of `note_files`, else from the files that are there. Raises BadCheckpoint.
        """
        if noted := self._noted(commit, has_weights):
            return noted
        snapshot = self.snapshot(commit)
        names = set(os.listdir(snapshot)) if snapshot.is_dir() else set()
        tokenizer = next((name for name in TOKENIZERS if name in names), TOKENIZERS[0])
        small = ["config.json", tokenizer, *small_files(names)]
        if not has_weights:
            return dict.fromkeys(small)
        has_index = (snapshot / INDEX_FILE).is_file()
        weights = weight_files(names if has_index else names - {INDEX_FILE}, snapshot / INDEX_FILE)
        return dict.fromkeys([*small, *(weights or [SINGLE_FILE])])

    def is_noted(self, commit: str, has_weights: bool = True) -> bool:
        """Return whether the needed files of this commit are known."""
        return bool(self._noted(commit, has_weights))

    def _noted(self, commit: str, has_weights: bool) -> dict[str, int | None]:
        noted: dict[str, int | None] = self._record()["commits"].get(commit, {})
        small = {name: size for name, size in noted.items() if name in SMALL_FILES}
        if not has_weights:
            return small
        # a gateway notes no weights
        return noted if noted.keys() - small.keys() - {INDEX_FILE} else {}

    def note_files(self, commit: str, sizes: Mapping[str, int | None]) -> None:
        """Record the files that Weft needs of a commit."""
        record = self._record()
        record["commits"][commit] = {**record["commits"].get(commit, {}), **sizes}
        self._keep(record)

    def missing(self, commit: str, names: Iterable[str]) -> list[str]:
        """Return the files that are not there; a dangling link counts as such."""
        return [name for name in names if not (self.snapshot(commit) / name).exists()]

    def damaged(self, commit: str, sizes: Mapping[str, int | None], is_thorough: bool = False) -> list[str]:
        """Return the files with a wrong size or checksum.

        Files that were compared before and have kept size and date are skipped, unless `is_thorough`. In a cache that
        is read-only, only sizes are compared: the result could not be kept, and each start would read gigabytes.
        """
        record = self._record()
        may_note = os.access(self.folder, os.W_OK)
        bad, compared = [], {}
        for name, size in sizes.items():
            path = self.snapshot(commit) / name
            with os_errors_translated(str(path)):
                blob, stat = Path(os.path.realpath(path)), path.stat()
                stamp = [stat.st_size, stat.st_mtime_ns]
                if size is not None and size != stat.st_size:
                    bad.append(name)
                elif BLOB_NAME.fullmatch(blob.name) and (is_thorough or may_note):
                    if not is_thorough and record["compared"].get(blob.name) == stamp:
                        continue
                    if blob.name == _digest(blob, blob.name, stat.st_size):
                        compared[blob.name] = stamp
                    else:
                        bad.append(name)
        if compared and may_note:
            record["compared"].update(compared)
            self._keep(record)
        return bad

    def remove(self, commit: str, names: Iterable[str]) -> None:
        """Delete files and their blobs. Processes that have them mapped keep them."""
        for name in names:
            path = self.snapshot(commit) / name
            with os_errors_translated(str(path)):
                Path(os.path.realpath(path)).unlink(missing_ok=True)
                path.unlink(missing_ok=True)

    def _record(self) -> dict[str, dict[str, Any]]:
        try:
            found = json.loads((self.folder / RECORD_FILE).read_text())
            return {part: dict(found[part]) for part in ("commits", "compared")}
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return {"commits": {}, "compared": {}}

    def _keep(self, record: Mapping[str, Any]) -> None:
        with suppress(BadCheckpoint):  # a read-only cache is served, too
            self._write(self.folder / RECORD_FILE, json.dumps(record))

    def _write(self, path: Path, text: str) -> None:
        part = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
        with os_errors_translated(str(path)):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                part.write_text(text)
                os.replace(part, path)
            finally:
                part.unlink(missing_ok=True)


def _digest(path: Path, name: str, size: int) -> str:
    """Return the checksum of a file's content, of the kind that the name of its blob is."""
    digest = hashlib.sha256() if len(name) == 64 else hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    with path.open("rb", buffering=0) as file:
        buffer = memoryview(bytearray(READ_BYTES))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()
