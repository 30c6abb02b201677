"""Granite 3, dense or with experts, and HyperCLOVA X, which is near it."""

from __future__ import annotations

from dataclasses import replace

from weft.model.fields import Fields, read_common
from weft.model.spec import Experts, LayerSpec, ModelConfig, Norms

POST_NORMS = Norms(attention_output="post_norm1", mlp_output="post_norm2")


def read(fields: Fields) -> ModelConfig:
    config = read_common(fields)
    return replace(
        config,
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        attention_scale=fields.number("attention_multiplier", 1.0),
        logit_scale=1 / fields.number("logits_scaling", 1.0),
    )


def read_moe(fields: Fields) -> ModelConfig:
    config = read(fields)
    experts = Experts(
        num_experts=fields.count("num_local_experts", 8),
        top_k=fields.integer("num_experts_per_tok", 2),
        size=config.intermediate_size,
        router="router.layer",
        is_fused=True,
        is_output_first=True,
    )
    return replace(
        config,
        layers=(LayerSpec(has_experts=True),) * config.num_layers,
        experts=experts,
        mlp_name="block_sparse_moe",
        renamed=(("experts.gate_up_proj", "input_linear.weight"), ("experts.down_proj", "output_linear.weight")),
    )


def read_shared(fields: Fields) -> ModelConfig:
    config = read_moe(fields)
    assert config.experts is not None
    size = fields.integer("shared_intermediate_size", 1024, least=0)
    names = (("block_sparse_moe.shared_mlp", "shared_mlp"), ("mlp.gate_up_proj", "mlp.input_linear"))
    return replace(
        config,
        experts=replace(config.experts, shared_size=size, shared="shared_mlp"),
        is_gate_up_fused=True,
        renamed=(*config.renamed, *names, ("mlp.down_proj", "mlp.output_linear")),
    )


def read_hyperclovax(fields: Fields) -> ModelConfig:
    """Read a Granite with norms of outputs too; it multiplies logits where Granite divides."""
    config = read(fields)
    is_scaled = fields.values.get("attention_multiplier") is not None
    return replace(
        config,
        norms=POST_NORMS if fields.boolean("use_post_norm", True) else config.norms,
        logit_scale=fields.number("logits_scaling", 1.0),
        attention_scale=config.attention_scale if is_scaled else 0.0,
    )
