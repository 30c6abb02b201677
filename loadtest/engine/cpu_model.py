"""A Llama of random bfloat16 parameters, 213 million of them unless told otherwise: as fast as a trained one, and made
in two seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from loadtest.engine.cpu_task import VOCAB_SIZE

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "hidden_act": "silu",
}


def _scale(name: str) -> float:
    """Layers loud enough beside the embedding for the next token not to be the last one again."""
    return 0.02 if "embed" in name else 0.06


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, mlp = config["hidden_size"], config["intermediate_size"]
    q_size, kv_size = (config["head_dim"] * config[f"num_{heads}_heads"] for heads in ("attention", "key_value"))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for index in range(config["num_hidden_layers"]):
        root = f"model.layers.{index}."
        shapes |= {root + "input_layernorm.weight": (hidden,), root + "post_attention_layernorm.weight": (hidden,)}
        for name, shape in (("q", (q_size, hidden)), ("k", (kv_size, hidden)), ("v", (kv_size, hidden))):
            shapes[f"{root}self_attn.{name}_proj.weight"] = shape
        shapes[f"{root}self_attn.o_proj.weight"] = (hidden, q_size)
        for name, shape in (("gate", (mlp, hidden)), ("up", (mlp, hidden)), ("down", (hidden, mlp))):
            shapes[f"{root}mlp.{name}_proj.weight"] = shape
    return shapes


def make_model(folder: Path, config: Mapping[str, Any] = CONFIG) -> int:
    """Write it unless it is there; returns the number of parameters."""
    shapes = _shapes(config)
    if not (folder / "model.safetensors").exists():
        folder.mkdir(parents=True, exist_ok=True)
        source = torch.Generator().manual_seed(0)
        weights = {
            name: torch.randn(shape, generator=source) * _scale(name) if len(shape) == 2 else torch.ones(shape)
            for name, shape in shapes.items()
        }
        halves = {name: weight.bfloat16() for name, weight in weights.items()}
        (folder / "config.json").write_text(json.dumps(config))
        save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(torch.Size(shape).numel() for shape in shapes.values())
