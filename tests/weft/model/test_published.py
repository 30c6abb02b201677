"""The configs of published checkpoints are read as they are, and ask for as many weights as those have."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest

from weft.capacity.footprint import footprint
from weft.errors import BadCheckpoint
from weft.model.config import expected_tensors, read_config
from weft.model.kv_layout import block_bytes, kv_groups
from weft.model.spec import LayerSpec, ModelConfig, Temperature

CONFIGS = Path(__file__).parent / "configs"


def published(name: str) -> dict[str, Any]:
    """The fields of a published config.json."""
    fields: dict[str, Any] = json.loads((CONFIGS / name / "config.json").read_text())
    return fields


SCOUT, KIMI_K25, DEEPSEEK_V3 = published("llama4-scout"), published("kimi-k2.5"), published("deepseek-v3")
MISTRAL_7B, MIXTRAL_8X7B = published("mistral-7b"), published("mixtral-8x7b")


def read(fields: dict[str, Any], directory: Path) -> ModelConfig:
    """The config of a directory with these fields."""
    (directory / "config.json").write_text(json.dumps(fields))
    return read_config(directory)


def num_weights(config: ModelConfig) -> int:
    """Packed words count eight each, bytes of MXFP4 two, factors and shapes not at all."""
    factors, packed = ("_scale", "_scales", "_scale_inv", "_shape"), {"packed": 8, "blocks": 2}
    sizes = [(name, prod(shape)) for name, shape in expected_tensors(config).items() if not name.endswith(factors)]
    return sum(packed.get(name.rpartition("_")[2], 1) * size for name, size in sizes)


@pytest.mark.parametrize(
    ("name", "billions", "kv_bytes_per_token"),
    [
        ("llama3-8b", 8.030, 128 << 10),
        ("mistral-7b", 7.242, 128 << 10),
        ("qwen2.5-7b", 7.616, 56 << 10),
        ("qwen3-30b-a3b", 30.53, 96 << 10),
        ("mixtral-8x7b", 46.70, 128 << 10),
        ("llama4-scout", 107.8, 192 << 10),
        ("gpt-oss-20b", 20.91, 48 << 10),
        ("deepseek-v3", 671.0, 61 * 576 * 2),
        ("kimi-k2.5", 1026.0, 61 * 576 * 2),
    ],
)
def test_published_configs_ask_for_the_weights_that_were_published(
    name: str, billions: float, kv_bytes_per_token: int
) -> None:
    config = read_config(CONFIGS / name)
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


def test_gpt_oss_packs_the_experts_only() -> None:
    config = read_config(CONFIGS / "gpt-oss-20b")
    shapes = expected_tensors(config)
    experts = "model.layers.23.mlp.experts."
    assert shapes[experts + "gate_up_proj_blocks"] == (32, 5760, 90, 16)
    assert shapes[experts + "down_proj_scales"] == (32, 2880, 90)
    assert shapes[experts + "down_proj_bias"] == (32, 2880)
    assert len([name for name in shapes if name.endswith("_blocks")]) == 2 * 24
    # as many tensors and bytes as the published index counts
    assert len(shapes) == 459
    assert sum(each.size_bytes for each in footprint(config).values()) == 13_761_264_768
    assert config.layers[:2] == (LayerSpec(window=128, has_experts=True), LayerSpec(has_experts=True))


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
    quantization = read(fields, tmp_path).quantization
    assert quantization is not None
    assert quantization.is_ordered
    assert quantization.is_expanded


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
