"""Reads a Hugging Face checkpoint and checks it against its architecture. Reads headers, never tensor data.

The small files are in a directory. The weights are there too, or in the object store that the directory mirrors. A
bundle file replaces a missing safetensors file of the same name.

Pickled weights are rejected, because opening them can run code.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import BadCheckpoint, StorageUnavailable
from weft.file_io import PICKLE_SUFFIXES, foreign_names, path_exists
from weft.model.config import ModelConfig, expected_tensors, is_ignored, read_config, read_fields
from weft.model.fields import read_json
from weft.model.quantization import KV_SCALES, is_shape, stored_dtypes
from weft.model.tensors import stored_name
from weft.weights.formats import MODULES, TensorEntry, format_of
from weft.weights.object_store import origin_of
from weft.weights.safetensors import is_text
from weft.weights.storage import Origin, WeightsFile

logger = logging.getLogger(__name__)
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor that the model needs, and its file."""

    file: WeightsFile
    entry: TensorEntry


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Everything needed to read the weights.

    config_json: config.json with the end tokens of generation_config.json, the file that chat tuning updates.
    directory_id: names the directory. source_id: also changes when a file is rewritten or config.json needs other
    tensors.
    untied_head: an output matrix although config.json ties it to the embedding, see `weft.weights.tied_head`; not
    one of `tensors`. unread_files: further weight files in the directory, of another set or left over.
    """

    directory: Path
    config_json: str
    tensors: tuple[TensorSource, ...]
    directory_id: str
    source_id: str
    untied_head: TensorSource | None = None
    unread_files: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        return sum(tensor.entry.size_bytes for tensor in self.tensors)


def read_checkpoint(directory: Path) -> Checkpoint:
    """Read config, index and headers. Raises BadCheckpoint naming the file or tensor at fault, StorageUnavailable."""
    directory = directory.absolute()
    if not path_exists(directory):
        raise BadCheckpoint(f"{directory}: no such directory")
    origin = origin_of(directory)
    config = read_config(directory)
    found = find_tensors(directory, origin)
    tensors = _select(directory, config, found)
    head = found.get(stored_name(config.prefix + "lm_head.weight", config)) if config.is_tied else None
    state, name = source_id(directory, tensors, head), _digest([str(directory)])
    read = {source.file.name for source in found.values()}
    unread = tuple(sorted(each for each in origin.names() - read if each.endswith(tuple(MODULES))))
    return Checkpoint(directory, _served_config(directory, config), tensors, name, state, head, unread)


def checkpoint_of(directory: Path, config_json: str, tensors: tuple[TensorSource, ...], part: str = "") -> Checkpoint:
    """Return these tensors as a checkpoint. `part` names them if other tensors of the directory are another one."""
    name = _digest([str(directory), part] if part else [str(directory)])
    return Checkpoint(directory, config_json, tensors, name, source_id(directory, tensors))


def source_id(directory: Path, tensors: Sequence[TensorSource], second_head: TensorSource | None = None) -> str:
    """Return an ID of the current state of the files. Raises BadCheckpoint, StorageUnavailable."""
    files = {tensor.file.name: tensor.file for tensor in tensors}
    parts = [str(directory)]
    if second_head is not None:  # it was compared with the embedding in this state
        files[second_head.file.name] = second_head.file
        parts.append("second head")
    for name in sorted(files):
        parts += [name, *files[name].stamp()]
    for tensor in tensors:
        parts += [tensor.entry.name, tensor.entry.dtype, *map(str, tensor.entry.shape)]
    return _digest(parts)


@contextmanager
def while_unchanged(checkpoint: Checkpoint) -> Iterator[None]:
    """Detect files that change while the block reads them.

    An error that a changed file caused says nothing about the new file, and a successful read may mix old and new
    bytes. Both raise StorageUnavailable.
    """
    changed = f"{checkpoint.directory}: files changed while they were read"
    try:
        yield
    except BadCheckpoint as error:
        if _is_changed(checkpoint):
            raise StorageUnavailable(f"{changed}: {error}") from error
        raise
    if _is_changed(checkpoint):
        raise StorageUnavailable(changed)


def _is_changed(checkpoint: Checkpoint) -> bool:
    try:
        return source_id(checkpoint.directory, checkpoint.tensors, checkpoint.untied_head) != checkpoint.source_id
    except BadCheckpoint:
        return True  # one of them is gone


def files_state(directory: Path) -> str:
    """Return an ID of all files of a checkpoint, whether valid or not; it changes while a writer is active.

    Raises BadCheckpoint, StorageUnavailable.
    """
    parts, origin = list[str](), origin_of(directory)
    for name in sorted(origin.names()):
        parts.append(name)
        with suppress(BadCheckpoint, StorageUnavailable):  # a dangling link does not affect the other files
            parts += origin.stamp(name)
    return _digest(parts)


def find_tensors(directory: Path, origin: Origin) -> dict[str, TensorSource]:
    """Choose between two sets of weights as transformers does: the single file first, then the files of the index."""
    names = origin.names()
    if (single := _stored_name(SINGLE_FILE, names)) in names:
        return _read_files([WeightsFile(origin, single)])
    if INDEX_FILE in names:
        return _read_shards(directory / INDEX_FILE, origin)
    adapted = foreign_names(names & {"adapter_config.json", "adapter_model.safetensors"})
    if adapted:
        raise BadCheckpoint(f"{origin}: {adapted}")
    pickles = sorted(name for name in names if Path(name).suffix in PICKLE_SUFFIXES)
    if pickles:
        raise BadCheckpoint(
            f"{origin}/{pickles[0]}: pickled weights can run code and are not read; convert them to {SINGLE_FILE}"
        )
    if what := foreign_names(names):
        raise BadCheckpoint(f"{origin}: {what}")
    raise BadCheckpoint(f"{origin}: neither {SINGLE_FILE} nor {INDEX_FILE} is there")


def _read_shards(index: Path, origin: Origin) -> dict[str, TensorSource]:
    weight_map = read_weight_map(index)
    names = origin.names()
    shards = [_stored_name(name, names) for name in sorted(set(weight_map.values()))]
    if missing := [name for name in shards if name not in names]:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        what = f"no such file; {index.name} names it{others}, download what is missing"
        raise BadCheckpoint(f"{origin}/{missing[0]}: {what}")
    tensors = _read_files([WeightsFile(origin, name) for name in shards])
    for name, file in weight_map.items():
        if name not in tensors or Path(tensors[name].file.name).stem != Path(file).stem:
            raise BadCheckpoint(f"{index}: tensor {name} is not in {file}")
    return tensors


def read_weight_map(index: Path) -> dict[str, str]:
    """Return the file of every tensor according to the index. Raises BadCheckpoint, StorageUnavailable."""
    weight_map = read_json(index).values.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BadCheckpoint(f"{index}: weight_map is not a JSON object with entries")
    for name, file in weight_map.items():
        # A shard is next to its index; a map that points elsewhere tries to read other files.
        if not _is_name_of_shard(file):
            raise BadCheckpoint(f"{index}: tensor {name}: {file!r} is not the name of a safetensors file")
    return weight_map


def _is_name_of_shard(name: Any) -> bool:
    """Return whether the name is a plain, printable safetensors file name; JSON can hold NUL and lone surrogates."""
    if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
        return False
    return "\0" not in name and is_text(name)


def stored_tensors(directory: Path, files: Sequence[str]) -> dict[str, TensorSource]:
    """Return all tensors of these files by name. Raises BadCheckpoint, StorageUnavailable."""
    origin = origin_of(directory)
    return _read_files([WeightsFile(origin, name) for name in files])


def _read_files(files: Sequence[WeightsFile]) -> dict[str, TensorSource]:
    tensors: dict[str, TensorSource] = {}
    for file in files:
        for entry in _entries(file):
            if entry.name in tensors:
                raise BadCheckpoint(f"{file}: tensor {entry.name} is in {tensors[entry.name].file.name} as well")
            tensors[entry.name] = TensorSource(file, entry)
    return tensors


def _stored_name(name: str, names: Set[str]) -> str:
    """Return the file that holds the weights of `name`: itself, or one in another format if it is missing."""
    same = [str(Path(name).with_suffix(suffix)) for suffix in MODULES]
    return next((each for each in (name, *same) if each in names), name)


def _entries(file: WeightsFile) -> Sequence[TensorEntry]:
    with closing(file.open(cached=True)) as blob:
        return format_of(file.name).read_tensors(str(file), blob)


def _select(directory: Path, config: ModelConfig, found: dict[str, TensorSource]) -> tuple[TensorSource, ...]:
    """Return exactly the tensors that the architecture needs."""
    expected = expected_tensors(config)
    for name, shape in expected.items():
        source = found.get(name)
        if source is None:
            raise BadCheckpoint(f"{directory}: tensor {name} is missing{_packed_instead(name, found)}")
        if not is_shape(source.entry.shape, shape):
            raise BadCheckpoint(
                f"{source.file}: tensor {name} has shape {list(source.entry.shape)}, config.json asks for {list(shape)}"
            )
        if source.entry.dtype not in stored_dtypes(name, expected, config.quantization):
            raise BadCheckpoint(f"{source.file}: tensor {name} has dtype {source.entry.dtype}, not a weight's")
    for name, source in found.items():
        if name not in expected and not is_ignored(name, config):
            raise BadCheckpoint(f"{source.file}: tensor {name} is not part of a {config.architecture}")
    if scales := [name for name in found if name not in expected and name.endswith(KV_SCALES)]:
        logger.warning("KV scales ignored, the cache is not quantized directory=%s tensors=%d", directory, len(scales))
    return tuple(found[name] for name in expected)


def _packed_instead(name: str, found: Mapping[str, TensorSource]) -> str:
    """Return what the files hold in place of a plain weight that config.json names, such as a quantized head."""
    module = name.removesuffix("weight")
    others = sorted(other for other in found if other.startswith(module))
    what = "; config.json says that it is not quantized, or Weft does not read it so; take a checkpoint where it is not"
    return f": there is {others[0]}{what}" if others and name.endswith(".weight") else ""


def _served_config(directory: Path, config: ModelConfig) -> str:
    fields = read_fields(directory)
    # text_config of a wrapped model overrides the outer value.
    for part in (fields, fields.nested("text_config")):
        if config.eos_token_ids:
            part.values["eos_token_id"] = list(config.eos_token_ids)
    return json.dumps(fields.values)


def _digest(parts: Sequence[str]) -> str:
    content = "\0".join(parts).encode(errors="surrogatepass")  # file names are bytes without an encoding
    return hashlib.blake2b(content, digest_size=8).hexdigest()
