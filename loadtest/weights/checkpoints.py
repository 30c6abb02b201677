"""A Llama checkpoint of any size whose weights look like a language model's, made quickly."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from loadtest.weights.synthetic import tensor
from weft.model.config import expected_tensors, read_config
from weft.weights.formats import TensorEntry
from weft.weights.safetensors import header_bytes

HIDDEN, INTERMEDIATE, VOCAB = 2048, 8192, 32000
SHARD_BYTES = 1_000_000_000
POOL_ROWS = 4096


def make_checkpoint(directory: Path, gigabytes: float) -> int:
    """Write it; returns the bytes of its weights. Every tensor is another stretch of one pool of weights."""
    directory.mkdir(parents=True)
    layer_bytes = 2 * (4 * HIDDEN * HIDDEN + 3 * HIDDEN * INTERMEDIATE)
    fields = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE, "num_attention_heads": 16, "num_key_value_heads": 16,
        "num_hidden_layers": max(1, round((gigabytes * 1e9 - 2 * VOCAB * HIDDEN) / layer_bytes)),
        "max_position_embeddings": 4096, "torch_dtype": "bfloat16", "tie_word_embeddings": True,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(fields))
    pool = tensor("rowcol", POOL_ROWS, HIDDEN).reshape(-1)
    shards: list[list[TensorEntry]] = [[]]
    for name, shape in expected_tensors(read_config(directory)).items():
        size = 2 * int(np.prod(shape))
        if sum(entry.size_bytes for entry in shards[-1]) + size > SHARD_BYTES and shards[-1]:
            shards.append([])
        shards[-1].append(TensorEntry(name, "BF16", shape, 0, size))
    names = [f"model-{number + 1:05}-of-{len(shards):05}.safetensors" for number in range(len(shards))]
    for file, entries in zip(names, shards, strict=True):
        with (directory / file).open("wb") as out:
            out.write(header_bytes(entries, {"format": "pt"}))
            for number, entry in enumerate(entries):
                stretch = np.roll(pool, 977 * number)
                out.write(np.resize(stretch, entry.size_bytes // 2).tobytes())
    weight_map = {entry.name: file for file, entries in zip(names, shards, strict=True) for entry in entries}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return sum(entry.size_bytes for entries in shards for entry in entries)
