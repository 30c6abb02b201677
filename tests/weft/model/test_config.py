"""Configs are read in both spellings, and what cannot be served is refused by file and field."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.weft.tiny_llama import LLAMA3_ROPE, Tiny
from weft import file_io
from weft.errors import BadCheckpoint
from weft.kv.block_pool import fingerprint_digest
from weft.model import kv_layout
from weft.model.config import FAMILIES, Rope, read_config
from weft.model.fields import ORIGINAL
from weft.model.kv_layout import block_bytes, layout_name
from weft.request import ModelFingerprint

PLAIN: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
OLD_LLAMA3 = {**{key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}, "rope_type": "llama3"}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


def write(directory: Path, **changes: Any) -> Path:
    """A checkpoint directory with a config only; None takes a field away."""
    values = {key: value for key, value in {**PLAIN, **changes}.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(values))
    return directory


def test_absent_fields_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    config = read_config(write(tmp_path))
    assert (config.num_kv_heads, config.head_dim, config.is_tied) == (4, 8, False)
    assert (config.rms_norm_eps, config.max_positions, config.dtype) == (1e-6, 2048, "float32")
    assert config.rope == Rope(10_000.0)
    assert config.eos_token_ids == ()


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        ({"rope_theta": 5e5}, Rope(5e5)),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, Rope(5e5)),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}, Rope(5e5, "linear", 2.0)),
        ({"rope_theta": 1e4, "rope_scaling": OLD_LLAMA3}, Rope(1e4, "llama3", 8.0, 1.0, 4.0, 64)),
        ({"rope_theta": 7.0, "rope_parameters": LLAMA3_ROPE}, Rope(1e4, "llama3", 8.0, 1.0, 4.0, 64)),
        # both, and they agree; the length beside the object wins
        ({"rope_parameters": LLAMA3_ROPE, "rope_scaling": OLD_LLAMA3}, Rope(1e4, "llama3", 8.0, 1.0, 4.0, 64)),
        (
            {"rope_parameters": LLAMA3_ROPE, ORIGINAL: 9},
            Rope(1e4, "llama3", 8.0, 1.0, 4.0, 9),
        ),
    ],
)
def test_rope_is_read_as_transformers_4_and_5_write_it(tmp_path: Path, fields: dict[str, Any], rope: Rope) -> None:
    assert read_config(write(tmp_path, **fields)).rope == rope


@pytest.mark.parametrize(
    ("fields", "positions"),
    [
        ({"max_position_embeddings": 640}, 640),
        ({"max_position_embeddings": 512, "rope_scaling": YARN}, 2048),
        ({"max_position_embeddings": 640, "rope_scaling": YARN}, 2048),
        ({"max_position_embeddings": 2048, "rope_scaling": YARN}, 2048),
        ({"max_position_embeddings": 640, "rope_scaling": {"type": "yarn", "factor": 4.0}}, 2560),
        ({"max_position_embeddings": 640, "rope_scaling": {"type": "linear", "factor": 4.0}}, 640),
        ({"max_position_embeddings": 640, "rope_parameters": LLAMA3_ROPE}, 640),
        ({"max_position_embeddings": 1010, "dual_chunk_attention_config": {"chunk_size": 256}}, 1010),
        ({"max_position_embeddings": 1010, "dual_chunk_attention_config": {ORIGINAL: 256}}, 256),
    ],
)
def test_a_context_is_as_long_as_the_model_was_stretched_to(
    tmp_path: Path, fields: dict[str, Any], positions: int
) -> None:
    """As the cards of Qwen2.5 and Qwen3 say, and no longer than what is computed as they were trained."""
    assert read_config(write(tmp_path, **fields)).max_positions == positions


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (2, None, (2,)),
        (None, None, ()),
        ([2, 3], None, (2, 3)),
        (2, {"eos_token_id": [7, 8]}, (2, 7, 8)),
        ([2, 7], {"eos_token_id": 7}, (2, 7)),
        (2, {"eos_token_id": None}, (2,)),
        (None, {"eos_token_id": [7]}, (7,)),
        (2, {"top_p": 0.9}, (2,)),
        # no logits stand where these would be: to hold them back would end the engine
        ([2, 100], None, (2,)),
        (2, {"eos_token_id": [100, 7]}, (2, 7)),
    ],
)
def test_end_tokens_are_the_union_of_both_configs(
    tmp_path: Path, in_config: object, in_generation: object, expected: tuple[int, ...]
) -> None:
    write(tmp_path, eos_token_id=in_config)
    if in_generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(in_generation))
    assert read_config(tmp_path).eos_token_ids == expected


ADDED = {"id": 9, "content": "<end>", "special": True}
TOKENIZER_FILES: dict[str, dict[str, object]] = {
    "added_tokens_decoder": {"tokenizer_config": {"eos_token": "<end>", "added_tokens_decoder": {"9": ADDED}}},
    "added_tokens": {"tokenizer_config": {"eos_token": "<end>"}, "tokenizer": {"added_tokens": [ADDED]}},
    "an object": {"tokenizer_config": {"eos_token": ADDED}, "tokenizer": {"added_tokens": [ADDED]}},
    "vocab": {"tokenizer_config": {"eos_token": "<end>"}, "tokenizer": {"model": {"vocab": {"a": 0, "<end>": 9}}}},
    "unigram": {
        "tokenizer_config": {"eos_token": "b"},
        "tokenizer": {"model": {"vocab": [["a"]] * 9 + [["b"]]}},
    },
    "special_tokens_map": {
        "tokenizer_config": {"eos_token": None},
        "special_tokens_map": {"eos_token": ADDED},
        "tokenizer": {"added_tokens": [ADDED]},
    },
}


@pytest.mark.parametrize("files", TOKENIZER_FILES.values(), ids=TOKENIZER_FILES)
def test_end_tokens_include_the_tokenizers(tmp_path: Path, files: dict[str, object]) -> None:
    write(tmp_path, eos_token_id=2)
    for stem, content in files.items():
        (tmp_path / f"{stem}.json").write_text(json.dumps(content))
    assert read_config(tmp_path).eos_token_ids == (2, 9)


@pytest.mark.parametrize("settings", [{}, {"eos_token": None}, {"eos_token": "<other>"}, {"eos_token": ["<end>"]}])
def test_end_tokens_leave_out_an_unknown_eos_token(tmp_path: Path, settings: dict[str, object]) -> None:
    write(tmp_path, eos_token_id=2)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [ADDED], "model": {"vocab": {}}}))
    assert read_config(tmp_path).eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, ["architectures", "MambaForCausalLM", "families: Llama,"]),
        ({"architectures": None}, ["architectures"]),
        ({"hidden_size": None}, ["hidden_size", "None"]),
        ({"num_hidden_layers": "two"}, ["num_hidden_layers", "'two'"]),
        ({"vocab_size": 0}, ["vocab_size"]),
        ({"vocab_size": True}, ["vocab_size"]),
        ({"num_hidden_layers": 10**12}, ["num_hidden_layers", "at most 10000"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "3", "4"]),
        ({"head_dim": 7}, ["head_dim", "7"]),
        ({"hidden_act": "tanh"}, ["hidden_act", "tanh"]),
        ({"attention_bias": 1}, ["attention_bias"]),
        ({"mlp_bias": "no"}, ["mlp_bias"]),
        ({"rms_norm_eps": -1}, ["rms_norm_eps"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps", "nan"]),
        ({"rope_theta": 1, "rope_scaling": YARN}, ["rope_theta", "yarn"]),
        ({"rope_parameters": {**YARN, "rope_type": "yarn", "rope_theta": 1.0}}, ["rope_theta", "yarn"]),
        ({"rope_theta": 10**400}, ["rope_theta", "1000"]),
        ({"rope_scaling": {**YARN, "factor": float("inf")}}, ["rope_scaling.factor", "inf"]),
        ({"rope_scaling": {**YARN, "factor": 1e-320}}, ["rope_scaling.factor", "1e-320"]),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 10**400}}, ["rope_scaling.original", "1000"]),
        ({"torch_dtype": "int8"}, ["dtype", "int8"]),
        ({"eos_token_id": ["</s>"]}, ["eos_token_id", "</s>"]),
        ({"quantization_config": {"quant_method": "hqq"}}, ["quantization_config"]),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ["rope_scaling.rope_type", "dynamic"]),
        ({"rope_scaling": {"rope_type": "longrope"}}, ["rope_scaling.short_factor", "list of numbers"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["low_freq_factor"]),
        ({"rope_parameters": {**LLAMA3_ROPE, "high_freq_factor": 0.5}}, ["rope_parameters.high_freq_factor", "0.5"]),
        ({"rope_scaling": "llama3"}, ["rope_scaling"]),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, ["rope_parameters.full_attention"]),
        ({"rope_parameters": LLAMA3_ROPE, "rope_scaling": YARN}, ["rope_scaling.type", "yarn"]),
    ],
)
def test_a_config_that_cannot_be_served_is_refused_by_file_and_field(
    tmp_path: Path, fields: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(BadCheckpoint) as caught:
        read_config(write(tmp_path, **fields))
    for word in [str(tmp_path / "config.json"), *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_architecture_is_read_by_its_family(tmp_path: Path, architecture: str) -> None:
    """Families are imported by name. Each asks for a size first, of a wrapped model inside `text_config`."""
    with pytest.raises(
        BadCheckpoint, match=r"config\.json: (text_config\.)?(num_attention_heads|hidden_size): expected"
    ):
        read_config(write(tmp_path, architectures=[architecture], num_attention_heads="four"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no such file"),
        (b"{", "JSON"),
        (b"[]", "list"),
        (b"\xff", "JSON"),
        (b"[" * 100_000, "JSON"),
        (b'{"a":' * 200 + b"1" + b"}" * 200, "nested in more than 100 levels"),
        (b" " * 1001, "it has more than 1000 bytes"),
    ],
)
def test_a_file_that_is_no_config_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, words: str
) -> None:
    if words.startswith("it has"):
        monkeypatch.setattr(file_io, "MAX_SMALL_BYTES", 1000)
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(BadCheckpoint, match=words) as caught:
        read_config(tmp_path)
    assert "config.json" in str(caught.value)


def test_a_pipe_in_the_place_of_a_config_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(BadCheckpoint, match=r"config\.json: not readable: not a regular file"):
        read_config(tmp_path)


def test_a_block_holds_the_keys_and_values_of_all_layers(tiny: Tiny) -> None:
    config = tiny.config
    numbers = 16 * config.num_layers * 2 * config.num_kv_heads * config.head_dim
    assert block_bytes(config, "float32", 16) == 4 * numbers
    assert block_bytes(config, "bfloat16", 16) == 2 * numbers


def digest_of(directory: Path) -> bytes:
    """What begins the keys of its blocks, whatever its weights are."""
    return fingerprint_digest(ModelFingerprint("the same", "float32", 16, 4096, layout_name(read_config(directory))))


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e5},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}},
        {"rms_norm_eps": 1e-5},
    ],
)
def test_the_same_weights_under_another_config_have_other_kv(tmp_path: Path, fields: dict[str, Any]) -> None:
    plain = digest_of(write(tmp_path))
    assert digest_of(write(tmp_path, **fields)) != plain


@pytest.mark.parametrize(
    ("changed", "value"), [("num_experts_per_tok", 1), ("norm_topk_prob", False), ("routed_scaling_factor", 1.5)]
)
def test_the_same_experts_chosen_otherwise_have_other_kv(tmp_path: Path, changed: str, value: Any) -> None:
    published = Path(__file__).parent / "configs/kimi-k2.5"
    config = json.loads((published / "config.json").read_text())
    config["text_config"][changed] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert digest_of(tmp_path) != digest_of(published)


def test_what_changes_no_number_leaves_blocks_where_they_are(tmp_path: Path) -> None:
    plain = digest_of(write(tmp_path))
    others = {"eos_token_id": 7, "torch_dtype": "bfloat16", "max_position_embeddings": 4096, "rope_theta": 1e4}
    assert digest_of(write(tmp_path, **others)) == plain


def test_a_correction_of_what_is_computed_makes_other_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest_of(write(tmp_path))
    monkeypatch.setattr(kv_layout, "KV_NUMERICS", kv_layout.KV_NUMERICS + 1)
    assert digest_of(tmp_path) != before
