"""Enlarges a Llama checkpoint without changing what it computes: a small model's text at a large model's cost.

The residual stream, the heads and the MLP grow by four. New rows of the projections into a layer are random; new rows
and columns of the projections out of it are zero, and so are new columns of the stream. The layers that are appended
compute, but add zero. Logits keep every bit: a norm over four times the columns divides by half, so its weight is
halved, and its epsilon is a quarter.
`python -m loadtest.speculation.enlarge --out DIR` enlarges weft-nano to 191 million weights; `--head` enlarges an
EAGLE-3 head for it as well.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from loadtest.models import NANO

FACTOR = 4  # the root of it must be a power of two, or norms would round
NORM_FACTOR = 0.5
NUM_LAYERS = 16
NOISE = 0.02
INTO_LAYER = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
OUT_OF_LAYER = ("o_proj", "down_proj")
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


class Enlarger:
    """Enlarges tensors by the last part of their name. `hidden_size`: of the small model."""

    def __init__(self, hidden_size: int) -> None:
        self.hidden_size = hidden_size
        self._source = torch.Generator().manual_seed(0)

    def enlarge(self, name: str, weight: Tensor) -> Tensor:
        """Return the larger tensor of the same values. Raises ValueError for a name that it does not know."""
        kind = name.split(".")[-2]
        if weight.ndim == 1:
            return _pad(weight[None], 1, FACTOR * len(weight))[0] * NORM_FACTOR
        if kind in INTO_LAYER:
            return self._with_noise(self._pad_stream(weight, FACTOR * len(weight)), len(weight))
        if kind in OUT_OF_LAYER:
            return _pad(weight, FACTOR * weight.shape[0], FACTOR * weight.shape[1])
        if kind == "fc":
            return self._pad_stream(weight, FACTOR * len(weight))
        if kind in ("embed_tokens", "lm_head"):
            return self._pad_stream(weight, len(weight))
        raise ValueError(f"{name}: unknown tensor; only Llama layers and EAGLE-3 heads can be enlarged")

    def silence(self, name: str, weight: Tensor) -> Tensor:
        """Return a tensor of a layer that adds zero, from an enlarged one of the same kind."""
        kind = name.split(".")[-2]
        if kind in OUT_OF_LAYER:
            return torch.zeros_like(weight)
        return self._with_noise(weight, 0) if kind in INTO_LAYER else weight.clone()

    def _pad_stream(self, weight: Tensor, num_rows: int) -> Tensor:
        """Pad each piece of columns that reads one stream; a head's layer reads two and its `fc` three."""
        pieces = torch.split(weight, self.hidden_size, 1)
        return torch.cat([_pad(piece, num_rows, FACTOR * self.hidden_size) for piece in pieces], 1)

    def _with_noise(self, weight: Tensor, first: int) -> Tensor:
        """Return the weight with random rows from `first` on."""
        noise = torch.randn(len(weight) - first, weight.shape[1], generator=self._source) * NOISE
        return torch.cat((weight[:first], noise.to(weight.dtype)))


def _pad(weight: Tensor, num_rows: int, num_columns: int) -> Tensor:
    padded = weight.new_zeros(num_rows, num_columns)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    return padded


def enlarge_config(config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Return the config of the enlarged model or head."""
    larger = {name: FACTOR * config[name] for name in SIZES}
    if "target_hidden_size" in config:
        larger["target_hidden_size"] = FACTOR * config["target_hidden_size"]
    return {**config, **larger, "rms_norm_eps": config["rms_norm_eps"] / FACTOR, "num_hidden_layers": num_layers}


def enlarge_weights(weights: Mapping[str, Tensor], config: Mapping[str, Any], num_layers: int) -> dict[str, Tensor]:
    """Return the weights for `enlarge_config(config, num_layers)`; `config` is that of the small model."""
    enlarger = Enlarger(config["hidden_size"])
    larger = {name: enlarger.enlarge(name, weight) for name, weight in weights.items()}
    first = {name: weight for name, weight in larger.items() if name.startswith("model.layers.0.")}
    for index in range(config["num_hidden_layers"], num_layers):
        for name, weight in first.items():
            larger[name.replace(".0.", f".{index}.", 1)] = enlarger.silence(name, weight)
    return larger


def enlarge_checkpoint(source: Path, out: Path, num_layers: int) -> int:
    """Write the enlarged checkpoint of `source` with its tokenizer and return the number of weights."""
    config = json.loads((source / "config.json").read_text())
    weights = enlarge_weights(load_file(source / "model.safetensors"), config, num_layers)
    out.mkdir(parents=True, exist_ok=True)
    for path in source.glob("*token*.json"):
        shutil.copy(path, out / path.name)
    for name in ("chat_template.jinja", "generation_config.json"):
        if (source / name).exists():
            shutil.copy(source / name, out / name)
    (out / "config.json").write_text(json.dumps(enlarge_config(config, num_layers), indent=2) + "\n")
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return sum(weight.numel() for weight in weights.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=NANO)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=NUM_LAYERS)
    parser.add_argument("--head", type=Path, help="an EAGLE-3 head of the model; goes to OUT/draft")
    options = parser.parse_args()
    print(f"{enlarge_checkpoint(options.model, options.out, options.layers):,} weights in {options.out}")
    if options.head:
        print(f"{enlarge_checkpoint(options.head, options.out / 'draft', 1):,} weights in {options.out / 'draft'}")


if __name__ == "__main__":
    main()
