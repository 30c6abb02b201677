"""What a family cannot be asked for is refused by file and field, before a tensor is looked at."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.weft.tiny_families import FAMILIES, TinyFamily
from weft.errors import BadCheckpoint
from weft.model.config import read_config
from weft.model.decoder import Decoder

Family = Callable[[str], TinyFamily]

# a family in `FAMILIES`, what is changed in its config.json, and words of the refusal
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama2", {"architectures": ["Gemma2ForCausalLM"]}, "architectures: Gemma2ForCausalLM is not supported"),
    ("llama2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("llama2", {"head_dim": 9}, "head_dim"),
    ("mistral-window", {"sliding_window": "8"}, "sliding_window"),
    ("mixtral", {"num_experts_per_tok": 6}, "num_experts_per_tok: 6 of 5"),
    ("qwen2", {"layer_types": ["full_attention"]}, "layer_types"),
    ("qwen2", {"layer_types": ["linear_attention"] * 3}, "layer_types"),
    ("deepseek", {"attention_bias": True}, "attention_bias"),
    ("command-r", {"use_qk_norm": True}, "use_qk_norm"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ("qwen3-yarn", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_parameters.rope_type"),
    ("qwen3-moe", {"mlp_only_layers": [-1]}, "mlp_only_layers"),
    ("qwen3-moe", {"num_hidden_layers": 10**4, "num_experts": 10**4}, "num_hidden_layers: expected at most 100000"),
    ("qwen3-moe", {"num_experts_per_tok": 7}, "num_experts_per_tok: 7 of 6"),
    ("qwen3-moe", {"hidden_act": "gelu"}, "hidden_act: experts need silu"),
    ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers: expected 4 entries, found 2"),
    ("smollm3", {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
    ("llama4", {"no_rope_layers": [1, 0]}, "no_rope_layers"),
    ("llama4", {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
    ("llama4", {"attn_scale": 0}, "attn_scale"),
    ("llama4", {"num_experts_per_tok": 4}, "num_experts_per_tok: 4 of 3"),
    ("llama4", {"architectures": ["Llama4ForConditionalGeneration"]}, "text_config.num_attention_heads"),
    ("hunyuan-moe", {"moe_topk": [3, 3, 2]}, "moe_topk: expected a whole number"),
    ("hunyuan", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_parameters.rope_type"),
    ("ling2", {"use_qkv_bias": True}, "use_qkv_bias"),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
    ("laguna", {"gating": "per-layer"}, "gating: 'per-layer' is not supported"),
    ("laguna", {"num_attention_heads_per_layer": [6, 4, 4]}, "num_attention_heads_per_layer: expected one number"),
    ("laguna", {"num_attention_heads_per_layer": [5, 4, 5]}, "num_attention_heads_per_layer: 2 key heads"),
    ("deepseek", {"scoring_func": "softmax"}, "scoring_func"),
    ("deepseek", {"topk_method": "greedy"}, "topk_method"),
    ("deepseek", {"n_group": 3}, "n_group"),
    ("deepseek", {"topk_group": 1}, "num_experts_per_tok"),
    ("deepseek", {"qk_rope_head_dim": 5}, "head_dim"),
    ("deepseek", {"first_k_dense_replace": -1}, "first_k_dense_replace"),
    ("deepseek", {"num_nextn_predict_layers": 10**6}, "num_nextn_predict_layers: expected at most 10000"),
]


@pytest.mark.parametrize(("name", "change", "words"), REFUSED)
def test_a_config_beyond_the_family_is_refused_by_file_and_field(
    name: str, change: dict[str, Any], words: str, family_of: Family, tmp_path: Path
) -> None:
    config = json.loads((family_of(name).directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(BadCheckpoint) as caught:
        read_config(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_missing_tensor_is_named(name: str, family_of: Family) -> None:
    tiny = family_of(name)
    weights = tiny.weights
    for missing in (name for name in weights if not name.startswith(tiny.config.ignored)):
        rest = {key: value for key, value in weights.items() if key != missing}
        with pytest.raises(BadCheckpoint, match="is missing") as caught:
            Decoder(tiny.config, rest, torch.float32, torch.device("cpu"))
        assert missing in str(caught.value)


def test_a_tensor_of_another_shape_is_named(family_of: Family) -> None:
    tiny = family_of("llama2")
    config = replace(tiny.config, intermediate_size=80)
    with pytest.raises(BadCheckpoint, match=r"gate_proj.* has shape \[96, 64\], expected \[80, 64\]"):
        Decoder(config, tiny.weights, torch.float32, torch.device("cpu"))
