"""Gemma 3: norms of 1 + w on both sides, a window and a rotary embedding of its own in five layers of six."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.model.fields import FULL, SLIDING, Fields, read_common, read_layers, read_rope, read_window, split_rope
from weft.model.spec import HeadNorm, ModelConfig, Norms

# transformers' class; published files of the larger models leave most of it out
DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}
GEMMA: dict[str, Any] = {
    "num_key_value_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
NORMS = Norms(
    attention_output="post_attention_layernorm",
    mlp_input="pre_feedforward_layernorm",
    mlp_output="post_feedforward_layernorm",
)


def read(fields: Fields) -> ModelConfig:
    fields.refuse("attn_logit_softcapping", "use_bidirectional_attention")
    full, local = split_rope(fields)
    config = read_common(full, **DEFAULTS)
    local.values["rope_theta"] = fields.number("rope_local_base_freq", 10_000.0)
    pattern = fields.integer("sliding_window_pattern", 6)
    kinds = [SLIDING if (index + 1) % pattern else FULL for index in range(config.num_layers)]
    query_dim = fields.integer("query_pre_attn_scalar", 256)
    return replace(
        config,
        layers=read_layers(fields, read_window(fields, 4096), kinds),
        local_rope=read_rope(local),
        head_norm=HeadNorm.WEIGHTED,
        norms=NORMS,
        norm_offset=1.0,
        embedding_scale=config.hidden_size**0.5,
        logit_softcap=fields.number("final_logit_softcapping") if fields.values.get("final_logit_softcapping") else 0.0,
        attention_scale=0.0 if query_dim == config.head_dim else query_dim**-0.5,
    )


def read_gemma(fields: Fields) -> ModelConfig:
    """Read Gemma 1 without what Gemma 3 adds."""
    fields.refuse("use_bidirectional_attention")
    # the first files say gelu and mean its approximation
    fields.values = {**fields.values, "hidden_act": "gelu_pytorch_tanh"}
    config = read_common(fields, **GEMMA)
    return replace(config, norm_offset=1.0, embedding_scale=config.hidden_size**0.5)


def read_wrapped(fields: Fields) -> ModelConfig:
    text = fields.text_config()
    text.values.setdefault("tie_word_embeddings", True)
    return replace(read(text), prefix="language_model.", ignored=("vision_tower.", "multi_modal_projector."))
