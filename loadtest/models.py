"""Llama checkpoints of random bfloat16 weights: as fast as trained ones, and made in two seconds.

Random weights say nonsense, so benchmarks compare times, or two engines' texts, never quality.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from loadtest.engine.cpu_task import VOCAB_SIZE
from loadtest.report import ROOT
from weft.model.config import config_of, expected_tensors
from weft.model.fields import Fields

NANO = ROOT / "models" / "weft-nano"
# 213 million weights
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
# 30 million: two cores serve it quickly, yet computing is what its requests wait for
SMALL = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 10, "num_attention_heads": 8}


def make_model(folder: Path, config: Mapping[str, Any] = CONFIG) -> int:
    """Write the checkpoint unless it exists; return the number of weights."""
    shapes = expected_tensors(config_of(Fields(folder, dict(config))))
    if not (folder / "model.safetensors").exists():
        folder.mkdir(parents=True, exist_ok=True)
        source = torch.Generator().manual_seed(0)
        weights = {
            name: torch.randn(shape, generator=source) * _std(name) if len(shape) == 2 else torch.ones(shape)
            for name, shape in shapes.items()
        }
        (folder / "config.json").write_text(json.dumps(config))
        halves = {name: weight.bfloat16() for name, weight in weights.items()}
        save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(torch.Size(shape).numel() for shape in shapes.values())


def make_checkpoint(folder: Path, sizes: Mapping[str, int] = SMALL) -> Path:
    """Write a model of other `sizes` with weft-nano's vocabulary, tokenizer and chat template."""
    nano = json.loads((NANO / "config.json").read_text())
    ids = {name: nano[name] for name in ("vocab_size", "bos_token_id", "eos_token_id") if name in nano}
    make_model(folder, {**CONFIG, **sizes, **ids})
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(NANO / name, folder / name)
    return folder


def _std(name: str) -> float:
    """Layers must outweigh the embedding, or the next token is the last one again."""
    return 0.02 if "embed" in name else 0.06
