"""The configs of published checkpoints are read as they are, and ask for as many weights as those have."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest

from weft.errors import BadCheckpoint
from weft.model.config import expected_tensors, read_config
from weft.model.kv_layout import block_bytes, kv_groups
from weft.model.spec import LayerSpec, ModelConfig, Temperature

LLAMA_31_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 32000,
}
QWEN25_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MIXTRAL_8X7B = {
    **MISTRAL_7B,
    "architectures": ["MixtralForCausalLM"],
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "rope_theta": 1000000.0,
    "sliding_window": None,
}
SCOUT: dict[str, Any] = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "eos_token_id": [200001, 200007, 200008],
    "text_config": {
        "attention_bias": False,
        "attention_chunk_size": 8192,
        "attn_scale": 0.1,
        "floor_scale": 8192,
        "for_llm_compressor": False,
        "head_dim": 128,
        "hidden_size": 5120,
        "interleave_moe_layer_step": 1,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "max_position_embeddings": 10485760,
        "moe_layers": list(range(48)),
        "no_rope_layers": [],
        "num_attention_heads": 40,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 16.0,
            "high_freq_factor": 1.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
        "use_qk_norm": True,
        "vocab_size": 202048,
    },
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
KIMI_K25 = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "text_config": {
        **DEEPSEEK_V3,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 262144,
        "n_group": 1,
        "n_routed_experts": 384,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "num_nextn_predict_layers": 0,
        "quantization_config": {
            "config_groups": {
                "group_0": {
                    "input_activations": None,
                    "output_activations": None,
                    "targets": ["Linear"],
                    "weights": {
                        "actorder": None,
                        "group_size": 32,
                        "num_bits": 4,
                        "strategy": "group",
                        "symmetric": True,
                        "type": "int",
                    },
                }
            },
            "format": "pack-quantized",
            "ignore": [
                "lm_head",
                "re:.*self_attn.*",
                "re:.*shared_experts.*",
                "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
            ],
            "quant_method": "compressed-tensors",
        },
        "rms_norm_eps": 1e-05,
        "routed_scaling_factor": 2.827,
        "topk_group": 1,
        "vocab_size": 163840,
    },
}


def read(fields: dict[str, Any], directory: Path) -> ModelConfig:
    """The config of a directory with these fields."""
    (directory / "config.json").write_text(json.dumps(fields))
    return read_config(directory)


def num_weights(config: ModelConfig) -> int:
    """Packed words count eight each, factors and shapes not at all."""
    shapes = expected_tensors(config).items()
    sizes = [(name, prod(shape)) for name, shape in shapes if not name.endswith(("_scale", "_scale_inv", "_shape"))]
    return sum(8 * size if name.endswith("_packed") else size for name, size in sizes)


@pytest.mark.parametrize(
    ("fields", "billions", "kv_bytes_per_token"),
    [
        (LLAMA_31_8B, 8.030, 128 << 10),
        (MISTRAL_7B, 7.242, 128 << 10),
        (QWEN25_7B, 7.616, 56 << 10),
        (QWEN3_30B_A3B, 30.53, 96 << 10),
        (MIXTRAL_8X7B, 46.70, 128 << 10),
        (SCOUT, 107.8, 192 << 10),
        (DEEPSEEK_V3, 671.0, 61 * 576 * 2),
        (KIMI_K25, 1026.0, 61 * 576 * 2),
    ],
    ids=["llama-3.1-8b", "mistral-7b", "qwen2.5-7b", "qwen3-30b", "mixtral", "scout", "deepseek-v3", "kimi-k2.5"],
)
def test_published_configs_ask_for_the_weights_that_were_published(
    fields: dict[str, Any], billions: float, kv_bytes_per_token: int, tmp_path: Path
) -> None:
    config = read(fields, tmp_path)
    assert num_weights(config) / 1e9 == pytest.approx(billions, rel=1e-3)
    # a page is one group's share of a block
    assert block_bytes(config, "bfloat16", 64) * len(kv_groups(config).spans) == 64 * kv_bytes_per_token


def test_scout_has_no_positions_and_no_chunks_in_every_fourth_layer(tmp_path: Path) -> None:
    config = read(SCOUT, tmp_path)
    local, whole = LayerSpec(chunk=8192, has_experts=True), LayerSpec(is_rotated=False, has_experts=True)
    assert config.layers == (local, local, local, whole) * 12
    assert config.eos_token_ids == (200001, 200007, 200008)
    assert config.temperature == Temperature(8192, 0.1)


@pytest.mark.parametrize(("value", "expected"), [(4, Temperature(8192, 0.1)), (0, None), (False, None)])
def test_the_first_checkpoints_of_llama4_say_4_for_true(
    value: object, expected: Temperature | None, tmp_path: Path
) -> None:
    text = {**SCOUT["text_config"], "attn_temperature_tuning": value}
    assert read({**SCOUT, "text_config": text}, tmp_path).temperature == expected


def test_deepseek_packs_all_but_norms_router_embedding_and_head(tmp_path: Path) -> None:
    shapes = expected_tensors(read(DEEPSEEK_V3, tmp_path))
    assert shapes["model.layers.3.self_attn.kv_a_proj_with_mqa.weight_scale_inv"] == (5, 56)
    assert shapes["model.layers.60.mlp.experts.255.down_proj.weight_scale_inv"] == (56, 16)
    for name in ("model.embed_tokens", "lm_head", "model.layers.3.mlp.gate", "model.layers.0.input_layernorm"):
        assert name + ".weight" in shapes
        assert name + ".weight_scale_inv" not in shapes


def test_kimi_packs_the_routed_experts_only(tmp_path: Path) -> None:
    shapes = expected_tensors(read(KIMI_K25, tmp_path))
    packed = {name for name in shapes if name.endswith("_packed")}
    assert len(packed) == 60 * 384 * 3
    assert all(".mlp.experts." in name for name in packed)
    expert = "language_model.model.layers.1.mlp.experts.0.gate_proj.weight"
    assert (shapes[expert + "_packed"], shapes[expert + "_scale"]) == ((2048, 896), (2048, 224))


def test_llama_guard_4_has_no_experts_at_all(tmp_path: Path) -> None:
    none = {"num_local_experts": 0, "num_experts_per_tok": 0, "interleave_moe_layer_step": 0, "moe_layers": []}
    guard = {"attention_chunk_size": None, "no_rope_layers": [1] * 50}
    config = read({**SCOUT, "text_config": {**SCOUT["text_config"], **none, **guard}}, tmp_path)
    assert config.experts is None
    assert config.layers == (LayerSpec(),) * 48
    assert not [name for name in expected_tensors(config) if "expert" in name]


@pytest.mark.parametrize("order", [None, False, "weight", "static"])
def test_an_order_of_rounding_leaves_columns_where_they_are(order: object, tmp_path: Path) -> None:
    fields = json.loads(json.dumps(KIMI_K25))
    weights = fields["text_config"]["quantization_config"]["config_groups"]["group_0"]["weights"]
    weights["actorder"] = order
    assert read(fields, tmp_path).quantization == read(KIMI_K25, tmp_path).quantization
    weights["actorder"] = "group"
    with pytest.raises(BadCheckpoint, match="actorder"):
        read(fields, tmp_path)


def test_layers_that_predict_further_tokens_are_left_out_where_their_number_is(tmp_path: Path) -> None:
    fields = {name: value for name, value in DEEPSEEK_V3.items() if name != "num_nextn_predict_layers"}
    assert read(fields, tmp_path).ignored == ("model.layers.61.",)
    assert read({**fields, "num_nextn_predict_layers": 0}, tmp_path).ignored == ()


def test_absent_fields_are_those_of_the_family(tmp_path: Path) -> None:
    absent = ("rope_theta", "rms_norm_eps", "max_position_embeddings")
    config = read({name: value for name, value in MIXTRAL_8X7B.items() if name not in absent}, tmp_path)
    assert (config.rope.theta, config.rms_norm_eps, config.max_positions) == (1e6, 1e-5, 131_072)


@pytest.mark.parametrize("architecture", ["MistralForCausalLM", "MinistralForCausalLM"])
def test_a_mistral_has_its_window_in_the_layers_that_say_so(architecture: str, tmp_path: Path) -> None:
    """As Ministral 8B, whose class transformers chooses by `layer_types` alone."""
    kinds = ["full_attention", *["sliding_attention"] * 3] * 8
    config = read({**MISTRAL_7B, "architectures": [architecture], "layer_types": kinds}, tmp_path)
    assert config.layers == (LayerSpec(), *[LayerSpec(window=4096)] * 3) * 8
    with pytest.raises(BadCheckpoint, match="layer_types"):
        read({**MISTRAL_7B, "architectures": [architecture], "layer_types": kinds[1:]}, tmp_path)


def test_null_is_absent_where_a_word_is_expected(tmp_path: Path) -> None:
    fields = json.loads(json.dumps(DEEPSEEK_V3)) | {"scoring_func": None, "topk_method": None}
    fields["quantization_config"]["fmt"] = None
    assert read(fields, tmp_path) == read(DEEPSEEK_V3, tmp_path)
