"""StarCoder 2, Nemotron 4, Jais 2 (no gate in the MLP, LayerNorm, biases), Arcee (no gate), StableLM (LayerNorm)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.model.fields import Fields, read_common, read_window, set_defaults
from weft.model.spec import LayerSpec, ModelConfig, Norms

# transformers' classes
STARCODER: dict[str, Any] = {
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
JAIS: dict[str, Any] = {"max_position_embeddings": 8192, "hidden_act": "relu2"}
NEMOTRON: dict[str, Any] = {"max_position_embeddings": 4096, "hidden_act": "relu2", "partial_rotary_factor": 0.5}
STABLELM: dict[str, Any] = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "partial_rotary_factor": 0.25,
}
ARCEE: dict[str, Any] = {"max_position_embeddings": 4096, "hidden_act": "relu2", "rms_norm_eps": 1e-5}


def read_starcoder(fields: Fields) -> ModelConfig:
    set_defaults(fields, rms_norm_eps=fields.number("norm_epsilon", 1e-5), use_bias=True)
    is_biased = fields.boolean("use_bias")
    set_defaults(fields, attention_bias=is_biased, mlp_bias=is_biased)
    config = read_common(fields, **STARCODER)
    return replace(
        config,
        layers=(LayerSpec(window=read_window(fields, 0)),) * config.num_layers,
        is_gated=False,
        norms=Norms(is_centered=True, has_bias=True),
        renamed=(("mlp.up_proj", "mlp.c_fc"), ("mlp.down_proj", "mlp.c_proj")),
    )


def read_nemotron(fields: Fields) -> ModelConfig:
    set_defaults(fields, rms_norm_eps=fields.number("norm_eps", 1e-5))
    config = read_common(fields, rotates_part=True, **NEMOTRON)
    return replace(config, is_gated=False, norm_offset=1.0, norms=Norms(is_centered=True, has_bias=True))


def read_jais(fields: Fields) -> ModelConfig:
    set_defaults(fields, rms_norm_eps=fields.number("layer_norm_eps", 1e-5), attention_bias=True, mlp_bias=True)
    return replace(read_common(fields, **JAIS), is_gated=False, norms=Norms(is_centered=True, has_bias=True))


def read_stablelm(fields: Fields) -> ModelConfig:
    """Read StableLM: its MLP has a gate, and may read what attention reads."""
    fields.refuse("qk_layernorm")
    set_defaults(fields, rms_norm_eps=fields.number("layer_norm_eps", 1e-5))
    config = read_common(fields, rotates_part=True, **STABLELM)
    is_parallel = fields.boolean("use_parallel_residual")
    norms = Norms(is_centered=True, has_bias=True, is_parallel=is_parallel)
    return replace(
        config,
        has_qkv_bias=fields.boolean("use_qkv_bias"),
        norms=replace(norms, mlp_input="") if is_parallel else norms,
    )


def read_arcee(fields: Fields) -> ModelConfig:
    return replace(read_common(fields, **ARCEE), is_gated=False)
