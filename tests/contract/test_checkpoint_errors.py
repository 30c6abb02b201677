"""Every way a checkpoint directory can be wrong: one clear sentence that names the file and the tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.weft.tiny_families import make_family, wrap
from tests.weft.weights.checkpoints import (
    make_checkpoint,
    random_tensors,
    safetensors_bytes,
    with_header,
    write_config,
)

from weft.errors import BadCheckpoint
from weft.weights.checkpoint import read_checkpoint
from weft.worker.startup import parse_config

NORM = "model.norm.weight"
LAST = "lm_head.weight"
FIRST = "model-00001-of-00003.safetensors"
SHARD = "model-00002-of-00003.safetensors"
INDEX = "model.safetensors.index.json"


def edit_header(directory: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change the header of model.safetensors, keep its data."""
    file = directory / "model.safetensors"
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    fields = json.loads(raw[8 : 8 + length])
    edit(fields)
    file.write_bytes(with_header(fields, raw[8 + length :]))


def edit_index(directory: Path, edit: Callable[[dict[str, str]], object]) -> None:
    """Change the weight map."""
    index = json.loads((directory / INDEX).read_text())
    edit(index["weight_map"])
    (directory / INDEX).write_text(json.dumps(index))


def add_copy(directory: Path) -> None:
    """A shard under a second name."""
    (directory / "copy.safetensors").write_bytes((directory / SHARD).read_bytes())
    edit_index(directory, lambda weight_map: weight_map.update({"again": "copy.safetensors"}))


def rewrite(directory: Path, **changes: Any) -> None:
    """model.safetensors with tensors added, or left out where None."""
    tensors = {**random_tensors(directory), **changes}
    kept = {name.replace("__", "."): tensor for name, tensor in tensors.items() if tensor is not None}
    (directory / "model.safetensors").write_bytes(safetensors_bytes(kept))


def cut(file: Path, size: int) -> None:
    """Keep the first bytes."""
    file.write_bytes(file.read_bytes()[:size])


def stretch(fields: dict[str, Any]) -> None:
    """The last tensor reaches beyond the file, consistently."""
    last = max((each for name, each in fields.items() if name != "__metadata__"), key=lambda each: each["data_offsets"])
    last["shape"] = [last["shape"][0] + 1, *last["shape"][1:]]
    row = (last["data_offsets"][1] - last["data_offsets"][0]) // (last["shape"][0] - 1)
    last["data_offsets"][1] += row


def shift(by: int) -> Callable[[dict[str, Any]], None]:
    """Move one tensor over its neighbour, or away from it."""

    def edit(fields: dict[str, Any]) -> None:
        fields[NORM]["data_offsets"] = [offset + by for offset in fields[NORM]["data_offsets"]]

    return edit


def set_field(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Give the norm's entry another value."""

    def edit(fields: dict[str, Any]) -> None:
        fields[NORM][name] = value

    return edit


SINGLE: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "no config": (lambda d: (d / "config.json").unlink(), ["config.json", "no such file"]),
    "config is no JSON": (lambda d: (d / "config.json").write_text("{"), ["config.json", "JSON"]),
    "config is a list": (lambda d: (d / "config.json").write_text("[]"), ["config.json", "object"]),
    "config lacks a field": (lambda d: write_config(d, hidden_size=None), ["config.json", "hidden_size"]),
    "another architecture": (lambda d: write_config(d, architectures=["GPT2LMHeadModel"]), ["GPT2LMHeadModel"]),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), ["neither model.safetensors nor"]),
    "pickled weights": (
        lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"),
        ["pytorch_model.bin", "pickled", "safetensors"],
    ),
    "an empty file": (lambda d: cut(d / "model.safetensors", 0), ["model.safetensors", "truncated"]),
    "cut in the length": (lambda d: cut(d / "model.safetensors", 5), ["model.safetensors", "truncated"]),
    "cut in the header": (lambda d: cut(d / "model.safetensors", 300), ["model.safetensors", "truncated: the header"]),
    "cut in the data": (lambda d: cut(d / "model.safetensors", -10), ["model.safetensors", "truncated: tensor", LAST]),
    "too long": (
        lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes() + b"more"),
        ["model.safetensors", "4 bytes at the end"],
    ),
    "not safetensors at all": (
        lambda d: (d / "model.safetensors").write_bytes(b"GGUF" * 1000),
        ["model.safetensors", "GGUF"],
    ),
    "header is no JSON": (
        lambda d: (d / "model.safetensors").write_bytes((4).to_bytes(8, "little") + b"{{{{"),
        ["model.safetensors", "header", "JSON"],
    ),
    "header is nested too deep": (
        lambda d: (d / "model.safetensors").write_bytes((200_000).to_bytes(8, "little") + b"[" * 200_000),
        ["model.safetensors", "header", "JSON"],
    ),
    "offsets beyond the file": (lambda d: edit_header(d, stretch), ["truncated: tensor", LAST]),
    "a negative offset": (lambda d: edit_header(d, shift(-100_000)), [NORM, "data_offsets"]),
    "overlap": (lambda d: edit_header(d, shift(-8)), [NORM, "overlaps"]),
    "hole": (lambda d: edit_header(d, lambda fields: fields.pop(NORM)), ["64 bytes before tensor", LAST]),
    "a name that is no text": (
        lambda d: edit_header(d, lambda fields: fields.update({"\ud800": fields.pop(NORM)})),
        ["model.safetensors", r"tensor '\ud800': its name is no text"],
    ),
    "unknown dtype": (lambda d: edit_header(d, set_field("dtype", "Q4_K")), [NORM, "unknown dtype 'Q4_K'"]),
    "dtype is no text": (lambda d: edit_header(d, set_field("dtype", ["F32"])), [NORM, "unknown dtype"]),
    "not a weight's dtype": (lambda d: rewrite(d, **{NORM: ("I32", (16,), bytes(64))}), [NORM, "I32"]),
    "shape and size disagree": (lambda d: edit_header(d, set_field("shape", [17])), [NORM, "68", "64"]),
    "a negative shape": (lambda d: edit_header(d, set_field("shape", [-16])), [NORM, "shape"]),
    "very many dimensions": (
        lambda d: edit_header(d, set_field("shape", [2] * 17)),
        [NORM, "shape", "not a list of at most 16"],
    ),
    "a dimension of thousands of digits": (
        lambda d: edit_header(d, set_field("shape", [0, 10**4000])),
        [NORM, "shape", "not a list of at most 16"],
    ),
    "an offset of thousands of digits": (
        lambda d: edit_header(d, set_field("data_offsets", [0, 10**4000])),
        [NORM, "data_offsets", "not a range"],
    ),
    "a missing tensor": (lambda d: rewrite(d, **{NORM: None}), [NORM, "missing"]),
    "a wrong shape": (lambda d: rewrite(d, **{NORM: ("F32", (17,), bytes(68))}), [NORM, "[17]", "[16]"]),
    "a tensor too many": (lambda d: rewrite(d, **{"model.extra": ("F32", (1,), bytes(4))}), ["model.extra", "Llama"]),
}
SHARDED: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "a missing shard": (lambda d: (d / SHARD).unlink(), [SHARD, "no such file"]),
    "a truncated shard": (lambda d: cut(d / SHARD, -1), [SHARD, "truncated"]),
    "index is no JSON": (lambda d: (d / INDEX).write_text("nothing"), [INDEX, "JSON"]),
    "index without map": (lambda d: (d / INDEX).write_text("{}"), [INDEX, "weight_map"]),
    "a tensor in another shard": (lambda d: edit_index(d, lambda m: m.update({NORM: FIRST})), [INDEX, NORM, FIRST]),
    "a shard outside": (
        lambda d: edit_index(d, lambda m: m.update({NORM: "../model.safetensors"})),
        [INDEX, NORM, "../model.safetensors"],
    ),
    "a shard twice": (add_copy, ["is in copy.safetensors as well"]),
}


@pytest.mark.parametrize("case", SINGLE)
def test_a_damaged_checkpoint_is_refused_by_name(tmp_path: Path, case: str) -> None:
    damage, words = SINGLE[case]
    make_checkpoint(tmp_path)
    read_checkpoint(tmp_path)
    damage(tmp_path)
    with pytest.raises(BadCheckpoint) as refusal:
        read_checkpoint(tmp_path)
    assert [word for word in words if word not in str(refusal.value)] == [], str(refusal.value)


@pytest.mark.parametrize("case", SHARDED)
def test_damaged_shards_are_refused_by_name(tmp_path: Path, case: str) -> None:
    damage, words = SHARDED[case]
    make_checkpoint(tmp_path, num_shards=3)
    read_checkpoint(tmp_path)
    damage(tmp_path)
    with pytest.raises(BadCheckpoint) as refusal:
        read_checkpoint(tmp_path)
    assert [word for word in words if word not in str(refusal.value)] == [], str(refusal.value)


def test_no_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="nowhere: no such directory"):
        read_checkpoint(tmp_path / "nowhere")


def test_a_name_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    header = b'{"a": 1, "a": 2}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(BadCheckpoint, match="occurs twice"):
        read_checkpoint(tmp_path)


def test_what_older_tools_add_is_ignored(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    rotary = "model.layers.0.self_attn.rotary_emb.inv_freq"
    write_config(tmp_path, tie_word_embeddings=True)
    rewrite(tmp_path, **{rotary: ("F32", (4,), bytes(16)), "lm_head.weight": ("F32", (64, 16), bytes(4096))})
    names = {tensor.entry.name for tensor in read_checkpoint(tmp_path).tensors}
    assert rotary not in names
    assert "lm_head.weight" not in names


def test_served_config_has_the_end_tokens_of_every_file(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"</s>": 5}}}))
    assert json.loads(read_checkpoint(tmp_path).config_json)["eos_token_id"] == [2, 7, 9, 5]


def test_end_tokens_reach_the_text_model_of_a_wrapped_one(tmp_path: Path) -> None:
    """What workers read is this text alone; the text model's own word would win there."""
    tiny = wrap(make_family("llama4", tmp_path), "Llama4ForConditionalGeneration", tmp_path / "wrapped")
    fields = json.loads((tiny.directory / "config.json").read_text())
    fields["text_config"]["eos_token_id"] = 3
    (tiny.directory / "config.json").write_text(json.dumps(fields))
    (tiny.directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert parse_config(read_checkpoint(tiny.directory).config_json).eos_token_ids == (3, 2, 7, 9)
