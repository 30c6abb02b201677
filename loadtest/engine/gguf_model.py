"""A checkpoint as GGUF for llama.cpp, in float16 or bfloat16, with its byte-level BPE tokenizer if it has one.

    python -m loadtest.engine.gguf_model FOLDER DTYPE        prints the file's path

Runs in llama.cpp's environment (`loadtest/engine/peers.sh llama`). GGUF names one of llama.cpp's own rules for how text
is split before merges; "qwen2" is nearest to weft-nano's, which splits digits too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


def convert(folder: Path, dtype: str) -> Path:
    """Write the checkpoint as GGUF unless that exists; return its path."""
    path = folder / f"model-{dtype}.gguf"
    if path.exists():
        return path
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    if (folder / "tokenizer.json").exists():
        add_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text()), config)
    else:
        writer.add_tokenizer_model("none")
    for name, tensor in read_bfloat16(folder / "model.safetensors"):
        name, tensor = _to_gguf(name, tensor, config["head_dim"])
        if tensor.ndim == 1:  # norms stay float32
            writer.add_tensor(name, tensor)
        elif dtype == "bfloat16":
            halves = (tensor.view(np.uint32) >> 16).astype(np.uint16)  # exact: the checkpoint holds bfloat16
            writer.add_tensor(name, halves.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(name, tensor.astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def read_bfloat16(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a safetensors file as float32."""
    data = np.memmap(path, dtype=np.uint8, mode="r")
    size = int(data[:8].view(np.uint64)[0])
    for name, entry in json.loads(bytes(data[8 : 8 + size])).items():
        if name != "__metadata__":
            start, end = (8 + size + offset for offset in entry["data_offsets"])
            halves = np.frombuffer(bytes(data[start:end]), dtype=np.uint16)
            yield name, (halves.astype(np.uint32) << 16).view(np.float32).reshape(entry["shape"])


def _to_gguf(name: str, tensor: Any, head_dim: int) -> tuple[str, Any]:
    """Rename a tensor. llama.cpp rotates neighbouring pairs where checkpoints rotate halves: rows of q and k move."""
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        tensor = tensor.reshape(-1, 2, head_dim // 2, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)
    if name.startswith("model.layers."):
        _, _, index, rest = name.split(".", 3)
        return f"blk.{index}.{NAMES[rest]}", np.ascontiguousarray(tensor)
    return NAMES[name], tensor


def add_tokenizer(writer: Any, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    """Write tokens in the order of their ids, their types, and merges."""
    added = {each["id"]: each for each in tokenizer["added_tokens"]}
    names = {number: text for text, number in tokenizer["model"]["vocab"].items()}
    names |= {number: each["content"] for number, each in added.items()}
    numbers = range(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([names.get(number, f"[unused{number}]") for number in numbers])
    writer.add_token_types([_type(number, names, added) for number in numbers])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def _type(number: int, names: dict[int, str], added: dict[int, Any]) -> gguf.TokenType:
    if number not in names:
        return gguf.TokenType.UNUSED
    if number not in added:
        return gguf.TokenType.NORMAL
    return gguf.TokenType.CONTROL if added[number]["special"] else gguf.TokenType.USER_DEFINED


if __name__ == "__main__":
    print(convert(Path(sys.argv[1]), sys.argv[2]))
