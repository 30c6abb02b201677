"""Reads the recorded draft heads."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from weft.model.draft import DraftTarget
from weft.model.draft_layers import Producer
from weft.model.eagle import EagleHead
from weft.model.spec import LayerSpec, ModelConfig, Rope
from weft.weights.draft_checkpoint import read_draft_checkpoint
from weft_kernels.linear import pack

FOLDER = Path(__file__).parent
VOCABULARY = 128
PRODUCERS = {
    "safeai": Producer.SAFEAI,
    "specforge": Producer.SPECFORGE,
    "specforge31": Producer.SPECFORGE,
    "speculators": Producer.SPECULATORS,
    "speculators-qwen3": Producer.SPECULATORS,
    "speculators31": Producer.SPECULATORS,
    "modelopt": Producer.MODELOPT,
    "kimi": Producer.KIMI,
}
TARGET = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=96,
    layers=(LayerSpec(),) * 12,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope=Rope(10_000.0),
    max_positions=256,
    is_tied=False,
    eos_token_ids=(),
    dtype="float32",
)


@dataclass
class Head:
    """A recorded head: its files, and what was recorded."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    target: dict[str, Tensor]
    recorded: dict[str, Tensor]

    def write(self, directory: Path) -> Path:
        (directory / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, directory / "model.safetensors")
        return directory

    def model(self, directory: Path, is_resident: bool = False) -> EagleHead:
        draft = read_draft_checkpoint(self.write(directory), TARGET).config
        return EagleHead(draft, self.tensors, self.draft_target(is_resident))

    def draft_target(self, is_resident: bool = False) -> DraftTarget:
        zeros = torch.zeros(VOCABULARY, 64)
        embedding, output = (self.target.get(name, zeros) for name in ("embed_tokens", "lm_head"))
        return DraftTarget(
            embedding, pack(output.float(), torch.float32), torch.float32, torch.device("cpu"), is_resident
        )


def read_head(name: str) -> Head:
    parts: dict[str, dict[str, Tensor]] = {"head": {}, "target": {}, "": {}}
    with safe_open(FOLDER / f"{name}.safetensors", "pt") as file:
        config = json.loads(file.metadata()["config"])
        for key in file.keys():  # noqa: SIM118
            kind, _, rest = key.partition(".")
            parts[kind if rest else ""][rest or kind] = file.get_tensor(key)
    return Head(config, parts["head"], parts["target"], parts[""])
