"""Converts whole directories: a checkpoint into a bundle and back, and verifies every chunk.

A conversion is atomic, and an interrupted one resumes (`atomic_directory.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

from weft.errors import BadCheckpoint
from weft.file_io import copy_ownership, foreign_names, fsync_path, os_errors_translated
from weft.weights.checkpoint import INDEX_FILE, read_weight_map
from weft.weights.draft_checkpoint import BESIDE
from weft.weights.formats import BUNDLE_SUFFIX
from weft.weights.safetensors import read_header
from weft.weights.storage import stamp_of
from weft_bundle.atomic_directory import atomic_directory, source_files, stamps_of
from weft_bundle.chunks import Bytes
from weft_bundle.format import BundleHeader, read_bundle_header
from weft_bundle.map_ahead import map_ahead
from weft_bundle.pack import pack_file
from weft_bundle.unpack import BundleFile

WEIGHTS_SUFFIX = ".safetensors"
PIECE_BYTES = 4 * 1024 * 1024
PIECES_AHEAD = 64
"""Pieces decoded ahead of the writer: 256 MiB."""
Report = Callable[[str, int], None]
"""Called from any thread with a file name and the number of original bytes done since the last call."""


@dataclass(frozen=True, slots=True)
class ConversionResult:
    """Result of a run; sizes count weights only."""

    original_bytes: int
    stored_bytes: int
    num_files: int
    num_kept: int
    """Files that an earlier, interrupted run had finished."""


def weight_files(directory: Path, suffix: str) -> list[Path]:
    """Return the weight files, and then those of the draft head in the folder `draft`.

    Raises BadCheckpoint if the directory itself has none, StorageUnavailable.
    """
    with os_errors_translated(f"{directory}"):
        if not directory.is_dir():
            raise BadCheckpoint(f"{directory}: no such directory")
        names = {path.name for path in directory.iterdir()}
    files = [directory / name for name in sorted(names) if name.endswith(suffix)]
    if ("config.json" not in names or not files) and (what := foreign_names(names)):
        raise BadCheckpoint(f"{directory}: {what}")
    if not files:
        advice = "; `weft compress MODEL OUT` makes a bundle" if suffix == BUNDLE_SUFFIX else ""
        raise BadCheckpoint(f"{directory}: there is no {suffix} file in it{advice}")
    with os_errors_translated(f"{directory / BESIDE}"):
        return [
            *files,
            *(path for path in source_files(directory) if path.parent != directory and path.suffix == suffix),
        ]


def check_index(files: Sequence[Path]) -> None:
    """Raise BadCheckpoint if an index next to these files names other files, or tensors that they lack."""
    for folder in dict.fromkeys(file.parent for file in files):
        if (index := folder / INDEX_FILE).is_file():
            _check_index(index, [file for file in files if file.parent == folder])


def _check_index(index: Path, files: Sequence[Path]) -> None:
    by_stem = {file.stem: file for file in files}
    held = {stem: _tensor_names(file) for stem, file in by_stem.items()}
    for name, listed in read_weight_map(index).items():
        stem = Path(listed).stem
        if stem not in by_stem:
            raise BadCheckpoint(f"{files[0].with_stem(stem)}: no such file; {INDEX_FILE} says that {name} is in it")
        if name not in held[stem]:
            raise BadCheckpoint(f"{by_stem[stem]}: tensor {name} is not in it; {INDEX_FILE} says that it is")


def _tensor_names(file: Path) -> set[str]:
    tensors = read_bundle_header(file).tensors if file.suffix == BUNDLE_SUFFIX else read_header(file).tensors
    return {tensor.name for tensor in tensors}


def compress(source: Path, target: Path, num_threads: int, report: Report) -> ConversionResult:
    """Create the bundle `target` from the checkpoint `source`. Raises BadCheckpoint, OSError (a full disk names the
    file)."""
    files = weight_files(source, WEIGHTS_SUFFIX)
    before = stamps_of(source)
    check_index(files)
    names = {file: str(file.relative_to(source).with_suffix(BUNDLE_SUFFIX)) for file in files}
    headers, kept = [], 0
    with (
        atomic_directory(names, target, before) as place,
        ThreadPoolExecutor(num_threads, thread_name_prefix="compress") as threads,
    ):
        for file in files:
            made = place / names[file]
            if header := _finished(made, file):
                report(file.name, file.stat().st_size)
                kept += 1
            else:
                with _whole(made, file) as part:
                    header = pack_file(file, part, threads if num_threads > 1 else None, partial(report, file.name))
                    _check_same(file, before.get(str(file.relative_to(source))))
            headers.append(header)
    stored = sum((target / name).stat().st_size for name in names.values())
    return ConversionResult(sum(header.original.size_bytes for header in headers), stored, len(files), kept)


def decompress(source: Path, target: Path, num_threads: int, report: Report) -> ConversionResult:
    """Restore the checkpoint that `source` was made from, byte for byte. Raises BadCheckpoint, OSError."""
    files = weight_files(source, BUNDLE_SUFFIX)
    before = stamps_of(source)
    check_index(files)
    names = _original_names(source, files)
    original_bytes = kept = 0
    with (
        atomic_directory(names, target, before) as place,
        ThreadPoolExecutor(num_threads, thread_name_prefix="decompress") as threads,
    ):
        for file in files:
            with closing(BundleFile.open(file)) as bundle:
                made = place / names[file]
                original_bytes += bundle.header.original.size_bytes
                if made.exists() and _hash(made) == bundle.header.original.xxh3_128:
                    report(file.name, bundle.header.original.size_bytes)
                    kept += 1
                else:
                    with _whole(made, file) as part:
                        unpack_file(bundle, part, threads, report)
    return ConversionResult(original_bytes, sum(file.stat().st_size for file in files), len(files), kept)


def verify(source: Path, num_threads: int, report: Report) -> ConversionResult:
    """Decode every chunk and compare the checksums, and the files with the index.

    Raises BadCheckpoint naming file, tensor and chunk.
    """
    files = weight_files(source, BUNDLE_SUFFIX)
    check_index(files)
    original_bytes = 0
    with ThreadPoolExecutor(num_threads, thread_name_prefix="verify") as threads:
        for file in files:
            with closing(BundleFile.open(file)) as bundle:
                original_bytes += bundle.header.original.size_bytes
                digest = xxhash.xxh3_128(bundle.original_header())
                with closing(_pieces(bundle, threads, report)) as pieces:
                    for piece in pieces:
                        digest.update(piece.data)
                if digest.hexdigest() != bundle.header.original.xxh3_128:
                    raise BadCheckpoint(f"{file}: its tensors do not add up to {bundle.header.original.name}")
    return ConversionResult(original_bytes, sum(file.stat().st_size for file in files), len(files), 0)


def unpack_file(bundle: BundleFile, target: Path, threads: ThreadPoolExecutor, report: Report) -> None:
    """Write the safetensors file that `bundle` was made from. Raises BadCheckpoint, OSError."""
    digest = xxhash.xxh3_128()
    with target.open("wb") as file, closing(_pieces(bundle, threads, report)) as pieces:
        file.write(header := bundle.original_header())
        digest.update(header)
        for piece in pieces:
            file.write(piece.data)
            digest.update(piece.data)
    if digest.hexdigest() != bundle.header.original.xxh3_128:
        raise BadCheckpoint(f"{bundle.path}: its tensors do not add up to {bundle.header.original.name}")
    read_header(target)


def _pieces(bundle: BundleFile, threads: ThreadPoolExecutor, report: Report) -> Generator[Bytes]:
    """Yield the data of the original file in order, decoded a few pieces ahead. Close it before the bundle."""

    def read(name: str, first: int, size: int) -> Bytes:
        piece: Bytes = np.empty(size, np.uint8)
        bundle.read_into(name, first, piece)
        report(Path(bundle.path).name, size)
        return piece

    plan = [
        (tensor.name, first, min(PIECE_BYTES, tensor.original_bytes - first))
        for tensor in bundle.header.tensors
        for first in range(0, tensor.original_bytes, PIECE_BYTES)
    ]
    yield from map_ahead(threads, read, plan, PIECES_AHEAD)


@contextmanager
def _whole(path: Path, source: Path) -> Iterator[Path]:
    """Yield a temporary path; the file gets its name and the ownership of `source` once it is on disk.

    A failure leaves nothing.
    """
    part = path.with_name(path.name + ".part")
    try:
        yield part
        copy_ownership(source, part)
        fsync_path(part)
        os.replace(part, path)
    except OSError as error:
        # A failed write has no file name; other errors have one.
        name = error.filename if error.filename not in (None, str(part)) else str(path)
        raise OSError(error.errno, error.strerror, name) from error
    finally:
        part.unlink(missing_ok=True)


def _check_same(file: Path, before: tuple[str, ...] | None) -> None:
    """Raise BadCheckpoint if the file changed since the first look: its output might mix old and new bytes.

    All files are compared again at the end; this check fails early, before the output gets its name.
    """
    if stamp_of(file.stat()) != before:
        raise BadCheckpoint(f"{file}: changed while it was read")


def _finished(made: Path, source: Path) -> BundleHeader | None:
    """Return the header of a file that an earlier run made from the current `source`."""
    if not made.exists():
        return None
    try:
        header, stat = read_bundle_header(made), source.stat()
    except BadCheckpoint:
        return None  # another version, or damaged
    is_same = (header.original.size_bytes, header.original.mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    return header if is_same else None


def _hash(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def _original_names(source: Path, files: Sequence[Path]) -> dict[Path, str]:
    """Return the name of each restored file, relative to `source`.

    Raises BadCheckpoint for a name that is no plain file name, and if two files have the same name.
    """
    names: dict[Path, str] = {}
    for file in files:
        name = read_bundle_header(file).original.name
        if not _is_file_name(name) or not name.endswith(WEIGHTS_SUFFIX):
            raise BadCheckpoint(f"{file}: {name!r} is not the name of a safetensors file")
        name = str(file.relative_to(source).with_name(name))
        if name in names.values():
            raise BadCheckpoint(f"{file}: stands for {name}, as another file of the bundle does")
        names[file] = name
    return names


def _is_file_name(name: str) -> bool:
    """Return whether the name is a plain file name without a directory."""
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return Path(name).name == name and "\0" not in name
