"""Tiny random Llama models as Hugging Face makes them: the oracle, and the checkpoint that it saves."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from weft.model.config import ModelConfig, read_config

torch.set_num_threads(1)

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# Whole vectors of every instruction set: with sizes like these, steps of few rows go through all layers in one call.
WHOLE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}

# What differs between Llamas: shared key heads, tied heads, sizes that are no power of two, stretched positions.
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped": {**WHOLE, "num_attention_heads": 4, "num_key_value_heads": 2},
    "tied": {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": True},
    "odd": {
        "hidden_size": 42,
        "intermediate_size": 67,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 10,
    },
    "llama3": {"num_attention_heads": 4, "num_key_value_heads": 1, "rope_parameters": LLAMA3_ROPE},
}


@dataclass(frozen=True)
class Tiny:
    """A model, its checkpoint's directory and config, and its weights by name.

    The oracle is slow, and tests ask it for the same text many times: `texts` keeps its greedy tokens by prompt. The
    oracle's weights must not change after the first `greedy`; `replace` makes a model without texts.
    """

    oracle: Any
    directory: Path
    config: ModelConfig
    texts: dict[tuple[int, ...], list[int]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """What a weights service would map."""
        weights: dict[str, torch.Tensor] = dict(self.oracle.state_dict())
        if self.config.is_tied:
            del weights["lm_head.weight"]
        return weights

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Return the tokens that transformers generates, end tokens included."""
        known = self.texts.get(tuple(prompt), [])
        if len(known) < num_tokens:
            known = self.texts[tuple(prompt)] = self._generate(prompt, num_tokens)
        return known[:num_tokens]

    def _generate(self, prompt: list[int], num_tokens: int) -> list[int]:
        output = self.oracle.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        tokens: list[int] = output[0, len(prompt) :].tolist()
        return tokens

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """[len(tokens), vocab] float32."""
        with torch.inference_mode():
            logits: torch.Tensor = self.oracle(torch.tensor([tokens])).logits[0]
        return logits


def make_tiny(variant: str, directory: Path) -> Tiny:
    """Initialised wide enough that greedy text does not repeat one token."""
    torch.manual_seed(11)
    sizes = {"vocab_size": 131, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3}
    config = LlamaConfig(**{**sizes, "max_position_embeddings": 256, "initializer_range": 0.25, **VARIANTS[variant]})
    oracle: Any = LlamaForCausalLM(config)
    oracle.eval()
    oracle.save_pretrained(directory)
    return Tiny(oracle, directory, read_config(directory))
