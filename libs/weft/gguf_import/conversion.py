"""Writes a checkpoint out of a GGUF model, tensor by tensor: memory stays below a few hundred megabytes."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weft.errors import BadCheckpoint
from weft.file_io import fsync_path, with_filename
from weft.gguf_import.architectures import (
    BECOME_FIELDS,
    LAYER,
    TOP,
    Architecture,
    architecture_of,
    config_fields,
    shortest,
)
from weft.gguf_import.gguf_file import GgufModel, GgufTensor, open_gguf
from weft.gguf_import.tokenizer_json import end_tokens, tokenizer_files
from weft.model.config import config_of, expected_tensors
from weft.model.fields import Fields
from weft.weights.checkpoint import SINGLE_FILE
from weft.weights.formats import TensorEntry
from weft.weights.safetensors import header_bytes

LAYER_TENSOR = re.compile(r"blk\.(?P<layer>\d+)\.(?P<stem>\w+)\.(?P<kind>weight|bias)")
TOP_TENSOR = re.compile(r"(?P<stem>\w+)\.weight")
CHUNK_NUMBERS = 1 << 23
"""Numbers that are expanded at once."""
DTYPES = {"F32": ("float32", "F32", 4), "F16": ("float16", "F16", 2), "BF16": ("bfloat16", "BF16", 2)}
SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
Report = Callable[[int, int], None]
"""Receives the bytes that are written and the bytes of all tensors."""


@dataclass(frozen=True, slots=True)
class _Target:
    """A tensor to write: the whole source, or one of its experts; `num_heads` above 0 unpairs rows of its heads.

    offset: what the source's numbers are too large by.
    """

    shape: tuple[int, ...]
    source: GgufTensor
    expert: int | None = None
    num_heads: int = 0
    offset: float = 0.0

    @property
    def rows(self) -> Any:
        data = self.source.data if self.expert is None else self.source.data[self.expert]
        return data.reshape(self.shape[0], -1)

    @property
    def order(self) -> Any:
        """Order of the source's rows. llama.cpp keeps the two halves of a head as neighbouring pairs."""
        order = np.arange(self.shape[0])
        if self.num_heads:
            order = order.reshape(self.num_heads, -1, 2).swapaxes(1, 2).reshape(-1)
        return order


class Conversion:
    """A checked plan to convert one model. Raises BadCheckpoint for what Weft cannot serve, before any work."""

    def __init__(self, path: Path) -> None:
        self.model = open_gguf(path)
        architecture = architecture_of(self.model)
        self._dtype = _dtype(self.model)
        self._config = {
            **config_fields(self.model, architecture),
            "dtype": DTYPES[self._dtype][0],
            **end_tokens(self.model.fields),
        }
        self._files = tokenizer_files(self.model)
        self._targets = _targets(self.model, architecture, self._config)
        _check_kinds(self.model)

    @property
    def entries(self) -> list[TensorEntry]:
        """The tensors of the new file, in its order."""
        _, dtype, size = DTYPES[self._dtype]
        return [
            TensorEntry(name, dtype, target.shape, 0, size * int(np.prod(target.shape)))
            for name, target in self._targets.items()
        ]

    def write(self, out: Path, report: Report) -> None:
        """Create the directory `out`, complete or not at all. Raises BadCheckpoint if it exists, OSError."""
        self._check_place(out)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
            made = Path(scratch) / out.name
            made.mkdir()
            self._write_small(made)
            self._write_weights(made / SINGLE_FILE, report)
            fsync_path(made)
            os.rename(made, out)

    def _check_place(self, out: Path) -> None:
        if os.path.lexists(out):
            raise BadCheckpoint(f"{out}: exists already; remove it or name another directory")
        if not out.parent.is_dir():
            raise BadCheckpoint(f"{out.parent}: no such directory; create it or name another one")
        needed, free = sum(each.size_bytes for each in self.entries), shutil.disk_usage(out.parent).free
        if needed > free:
            raise BadCheckpoint(
                f"{out}: needs {needed / 1e9:.2f} GB, {out.parent.absolute()} has {free / 1e9:.2f} GB free; "
                "free space or name a directory on another disk"
            )

    def _write_small(self, made: Path) -> None:
        ids = {name: value for name, value in self._config.items() if name.endswith("_token_id")}
        generation = {**ids, **_sampling_defaults(self.model.fields)}
        files = {**self._files, "config.json": self._config, "generation_config.json": generation}
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content, indent=2, ensure_ascii=False)
            with with_filename(made / name):
                (made / name).write_text(text, encoding="utf-8")
            fsync_path(made / name)

    def _write_weights(self, path: Path, report: Report) -> None:
        from gguf import GGMLQuantizationType, dequantize, quantize

        dtype, entries = GGMLQuantizationType[self._dtype], self.entries
        total, done = sum(each.size_bytes for each in entries), 0
        with with_filename(path), path.open("wb") as file:
            file.write(header_bytes(entries, {"format": "pt"}))
            for target in self._targets.values():
                for rows in _chunks(target):
                    values = quantize(dequantize(rows, target.source.kind) - np.float32(target.offset), dtype)
                    file.write(values.data)
                    done += values.nbytes
                    report(done, total)
        fsync_path(path)


def _chunks(target: _Target) -> Iterator[Any]:
    rows, order = target.rows, target.order
    step = max(1, CHUNK_NUMBERS * len(order) // max(1, int(np.prod(target.shape))))
    for start in range(0, len(order), step):
        yield rows[order[start : start + step]]


def _sampling_defaults(fields: Fields) -> dict[str, Any]:
    """Return how the maker of the model samples, as generation_config.json has it; older files do not say."""
    stored = {name: fields.values.get(f"general.sampling.{key}") for name, key in SAMPLING.items()}
    found = {name: shortest(value) for name, value in stored.items() if isinstance(value, int | float)}
    if "top_k" in found:
        found["top_k"] = int(found["top_k"])
    return {"do_sample": found.get("temperature", 1.0) > 0, **found} if found else {}


def _dtype(model: GgufModel) -> str:
    """Return the GGML type to write: what most of the file is if that is a plain type, else BF16."""
    sizes = Counter[str]()
    for tensor in model.tensors.values():
        sizes[tensor.kind.name] += tensor.data.nbytes
    kind = sizes.most_common(1)[0][0] if sizes else ""
    return kind if kind in DTYPES else "BF16"


def _targets(model: GgufModel, architecture: Architecture, config: dict[str, Any]) -> dict[str, _Target]:
    """Return what to write by name, in the order of the model. Raises BadCheckpoint if it is not what Weft serves."""
    found = dict(_renamed(model, architecture, config))
    expected = expected_tensors(config_of(Fields(model.path, config)))
    for name, shape in expected.items():
        if name not in found:
            raise model.error(f"a tensor for {name} is missing; download the file again, or take another one")
        if found[name].shape != shape:
            where = f"tensor {found[name].source.name}"
            raise model.error(f"{where} has shape {list(found[name].shape)}, its metadata asks for {list(shape)}")
    if further := [each for name, each in found.items() if name not in expected]:
        raise model.error(f"tensor {further[0].source.name} is not part of a {architecture.name}; take another file")
    return {name: found[name] for name in expected}


def _renamed(model: GgufModel, architecture: Architecture, config: dict[str, Any]) -> Iterator[tuple[str, _Target]]:
    names = {**LAYER, **architecture.layer}
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in model.tensors.values():
        if tensor.name in BECOME_FIELDS:
            continue
        if (match := LAYER_TENSOR.fullmatch(tensor.name)) and match["stem"] in names:
            name = f"model.layers.{match['layer']}.{names[match['stem']]}.{match['kind']}"
            num_heads = heads.get(match["stem"], 0) if architecture.is_permuted else 0
        elif (match := TOP_TENSOR.fullmatch(tensor.name)) and match["stem"] in TOP:
            name, num_heads = f"{TOP[match['stem']]}.weight", 0
        else:
            raise model.error(f"tensor {tensor.name} is not part of a {architecture.name}; take another file")
        if "{expert}" in name:
            for expert in range(tensor.shape[0]):
                yield name.format(expert=expert), _Target(tensor.shape[1:], tensor, expert)
        else:
            offset = architecture.norm_offset if name.endswith("norm.weight") else 0.0
            yield name, _Target(tensor.shape, tensor, num_heads=num_heads, offset=offset)


def _check_kinds(model: GgufModel) -> None:
    """Raise BadCheckpoint if `gguf` cannot expand a type of this file."""
    from gguf import dequantize

    for tensor in {each.kind: each for each in model.tensors.values()}.values():
        try:
            dequantize(tensor.data.reshape(-1, tensor.data.shape[-1])[:1], tensor.kind)
        except NotImplementedError:
            what = f"tensor {tensor.name} has the type {tensor.kind.name}, which the package gguf cannot expand"
            raise model.error(f"{what}; take a file of another quantization") from None
