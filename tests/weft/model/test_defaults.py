"""What config.json leaves out is what transformers' config class of the family says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.weft.tiny_families import CLASSES, FAMILIES, ORACLES, WRAPPED
from weft.model.config import config_of
from weft.model.fields import Fields

NEEDED = {"vocab_size": 100, "hidden_size": 10_240, "intermediate_size": 64, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 640}  # as many as all numbers of key-value heads divide
ABSENT: list[dict[str, Any]] = [{}, {"num_key_value_heads": 2}, {"head_dim": 32}, {"max_position_embeddings": 1000}]


@pytest.mark.parametrize("given", ABSENT, ids=lambda given: next(iter(given), "nothing"))
@pytest.mark.parametrize("family", sorted({family for family, _ in FAMILIES.values()} - set(ORACLES)))
def test_what_is_absent_is_as_transformers_has_it(family: str, given: dict[str, Any]) -> None:
    values = {**NEEDED, **HEADS, **given}
    kind = "ForConditionalGeneration" if family in WRAPPED else "ForCausalLM"
    outer: dict[str, Any] = {"architectures": [family + kind]}
    if family in WRAPPED:
        whole = getattr(transformers, family + "Config")(text_config=values)
        oracle, outer = whole.text_config, {**outer, "text_config": values}
        oracle.tie_word_embeddings = whole.tie_word_embeddings
    else:
        oracle = getattr(transformers, CLASSES.get(family, family) + "Config")(**values)
        outer |= values
    config = config_of(Fields(Path("config.json"), outer))
    if stretched := {"Ministral3": 16 * 16_384, "Mistral4": 128 * 8192, "GptOss": 32 * 4096}.get(
        family
    ):  # by the default yarn
        oracle.max_position_embeddings = max(oracle.max_position_embeddings, stretched)
    rope = oracle.rope_parameters.get("full_attention", oracle.rope_parameters)
    found = [config.max_positions, config.rms_norm_eps, config.rope.theta, config.is_tied]
    expected = [oracle.max_position_embeddings, _eps(oracle), rope["rope_theta"]]
    assert found == [*expected, oracle.tie_word_embeddings]
    if config.latent is None:  # which keeps one vector for all heads
        head_dim = getattr(oracle, "head_dim", None) or 10_240 // 640
        assert (config.num_kv_heads, config.head_dim) == (oracle.num_key_value_heads or 640, head_dim)


def _eps(oracle: Any) -> float:
    names = ("rms_norm_eps", "layer_norm_eps", "norm_eps", "norm_epsilon")
    return next(float(getattr(oracle, name)) for name in names if hasattr(oracle, name))


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "SmolLM3"])
def test_null_means_a_key_for_each_query_head(family: str) -> None:
    """Where transformers' class takes it."""
    values: dict[str, Any] = {**NEEDED, **HEADS, "num_key_value_heads": None}
    assert getattr(transformers, family + "Config")(**values).num_key_value_heads == 640
    values = {"architectures": [family + "ForCausalLM"], **values}
    assert config_of(Fields(Path("config.json"), values)).num_kv_heads == 640


def test_any_other_null_is_as_good_as_absent() -> None:
    nulls = {"head_dim": None, "max_position_embeddings": None, "rms_norm_eps": None, "rope_theta": None}
    for family in ("Llama4", "Mistral", "Mixtral", "Qwen3", "SmolLM3"):
        values: dict[str, Any] = {"architectures": [family + "ForCausalLM"], **NEEDED, **HEADS}
        assert config_of(Fields(Path("config.json"), values | nulls)) == config_of(Fields(Path("config.json"), values))
