"""Checkpoints of a tiny Llama, whole or in shards, and ways to damage them. Written by hand: no library in between."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.model.config import expected_tensors, read_config

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "torch_dtype": "float32",
    "eos_token_id": 2,
}
ITEM_BYTES = {"F32": 4, "BF16": 2}

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


def write_config(directory: Path, **changes: Any) -> None:
    """config.json; None removes a field."""
    fields = {name: value for name, value in {**CONFIG, **changes}.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(fields))


def random_tensors(directory: Path, dtype: str = "F32") -> Tensors:
    """As config.json asks for; the first one in another dtype, so that alignment matters."""
    tensors: Tensors = {}
    for number, (name, shape) in enumerate(expected_tensors(read_config(directory)).items()):
        own = "BF16" if number == 0 else dtype
        count = 1
        for size in shape:
            count *= size
        tensors[name] = (own, shape, os.urandom(count * ITEM_BYTES[own]))
    return tensors


def safetensors_bytes(tensors: Tensors) -> bytes:
    """The file's bytes."""
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (dtype, shape, data) in tensors.items():
        fields[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + len(data)]}
        position += len(data)
    return with_header(fields, b"".join(data for _, _, data in tensors.values()))


def with_header(fields: Mapping[str, Any], data: bytes) -> bytes:
    """Any header before any data."""
    header = json.dumps(fields).encode()
    return len(header).to_bytes(8, "little") + header + data


def make_checkpoint(directory: Path, num_shards: int = 0) -> Tensors:
    """A good one; 0 shards: a single file."""
    directory.mkdir(parents=True, exist_ok=True)
    write_config(directory)
    tensors = random_tensors(directory)
    if num_shards == 0:
        (directory / "model.safetensors").write_bytes(safetensors_bytes(tensors))
        return tensors
    names = list(tensors)
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        held = names[shard::num_shards]
        (directory / file).write_bytes(safetensors_bytes({name: tensors[name] for name in held}))
        weight_map.update(dict.fromkeys(held, file))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tensors


def nothing(name: str, num_bytes: int) -> None:
    """Progress that nobody watches."""


def replace_with_another(path: Path, content: bytes) -> None:
    """As long and as old as the one that was there."""
    before = path.stat()
    (fresh := path.with_name("fresh")).write_bytes(content)
    os.utime(fresh, ns=(before.st_atime_ns, before.st_mtime_ns))
    fresh.replace(path)
    now = path.stat()
    assert (now.st_size, now.st_mtime_ns) == (before.st_size, before.st_mtime_ns)


def mount_line(place: Path, options: str) -> str:
    """Of /proc/self/mountinfo: the file system that holds this place has these options."""
    device = place.stat().st_dev
    return f"25 24 {os.major(device)}:{os.minor(device)} / {place} rw,relatime - tmpfs tmpfs {options}\n"
