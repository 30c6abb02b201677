"""A Llama of 213 million random bfloat16 parameters: as fast as a trained one, and made in two seconds."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from loadtest.engine.cpu_task import VOCAB_SIZE

HIDDEN, MLP, LAYERS, HEADS, KV_HEADS = 1024, 2816, 16, 16, 4
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HIDDEN // HEADS,
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


def make_model(folder: Path) -> int:
    """Write it unless it is there; returns the number of parameters."""
    kv_size = HIDDEN // HEADS * KV_HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB_SIZE, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for index in range(LAYERS):
        root = f"model.layers.{index}."
        shapes |= {root + "input_layernorm.weight": (HIDDEN,), root + "post_attention_layernorm.weight": (HIDDEN,)}
        for name, rows in (("q", HIDDEN), ("k", kv_size), ("v", kv_size), ("o", HIDDEN)):
            shapes[f"{root}self_attn.{name}_proj.weight"] = (rows, HIDDEN)
        for name, shape in (("gate", (MLP, HIDDEN)), ("up", (MLP, HIDDEN)), ("down", (HIDDEN, MLP))):
            shapes[f"{root}mlp.{name}_proj.weight"] = shape
    if not (folder / "model.safetensors").exists():
        folder.mkdir(parents=True, exist_ok=True)
        source = torch.Generator().manual_seed(0)
        weights = {
            name: torch.randn(shape, generator=source) * _scale(name) if len(shape) == 2 else torch.ones(shape)
            for name, shape in shapes.items()
        }
        halves = {name: weight.bfloat16() for name, weight in weights.items()}
        (folder / "config.json").write_text(json.dumps(CONFIG))
        save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(torch.Size(shape).numel() for shape in shapes.values())
