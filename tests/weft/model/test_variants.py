"""What re-uploads and relatives of published checkpoints say otherwise in config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.weft.model.test_published import DEEPSEEK_V3, KIMI_K25, MISTRAL_7B, MIXTRAL_8X7B, SCOUT, read
from weft.errors import BadCheckpoint
from weft.model.config import expected_tensors
from weft.model.spec import LayerSpec


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
