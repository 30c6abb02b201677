"""Turns checkpoints that transformers saves into the layouts in which models are published."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from weft import mistral_layout


def _publish_ling(directory: Path) -> None:
    """Turn a checkpoint of GLM-4.5 into one of Ling 2, by the names of its published class."""
    config = json.loads((directory / "config.json").read_text())
    names = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
    config = {names.get(name, name): value for name, value in config.items()}
    rope = config.pop("rope_parameters")
    config |= {"partial_rotary_factor": rope["partial_rotary_factor"], "rope_theta": rope["rope_theta"]}
    (directory / "config.json").write_text(json.dumps({**config, "architectures": ["BailingMoeV2ForCausalLM"]}))
    weights = load_file(directory / "model.safetensors")
    for name in [name for name in weights if name.endswith("q_proj.weight")]:
        parts = [weights.pop(name.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
        weights[name.replace("q_proj", "query_key_value")] = torch.cat(parts)
    theirs = [("self_attn", "attention"), ("o_proj", "dense"), ("q_norm", "query_layernorm")]
    theirs += [("k_norm", "key_layernorm"), ("embed_tokens", "word_embeddings")]
    theirs += [("e_score_correction_bias", "expert_bias")]
    renamed = {}
    for name, tensor in weights.items():
        for glm, ling in theirs:
            name = name.replace(glm, ling)
        renamed[name] = tensor
    save_file(renamed, directory / "model.safetensors")


def _publish_qwen3_vl_moe(directory: Path) -> None:
    """Swap inputs and outputs of experts, as transformers does when it loads a published checkpoint."""
    weights = load_file(directory / "model.safetensors")
    swapped = {name: tensor.mT.contiguous() if ".experts." in name else tensor for name, tensor in weights.items()}
    save_file(swapped, directory / "model.safetensors")


def publish_mistral(directory: Path, native: Path) -> None:
    """Write a checkpoint of Mistral Small 4 in the layout in which Mistral Large 3 is published."""
    config = json.loads((directory / "config.json").read_text())
    rope = config["rope_parameters"]
    params = {ours: config[theirs] for ours, theirs in (*mistral_layout.FIELDS.items(), *zip(SAME, SAME, strict=True))}
    params["moe"] = {ours: config[theirs] for ours, theirs in mistral_layout.MOE_FIELDS.items() if theirs in config}
    original = rope["original_max_position_embeddings"]
    yarn = {"factor": rope["factor"], "beta": rope["beta_fast"], "alpha": rope["beta_slow"]}
    params |= {"rope_theta": rope["rope_theta"], "yarn": {**yarn, "original_max_position_embeddings": original}}
    growth = {"original_max_position_embeddings": original, "beta": rope["llama_4_scaling_beta"]}
    params |= {"llama_4_scaling": growth, "multimodal": {"vision_encoder_args": {"image_size": 14}}}
    native.mkdir()
    (native / "params.json").write_text(json.dumps(params))
    weights = dict(_mistral_names(load_file(directory / "model.safetensors")))
    save_file({**weights, "vision_encoder.ln_pre.weight": torch.ones(2)}, native / "consolidated.safetensors")


SAME = mistral_layout.SAME_FIELDS
MISTRAL_NAMES = (
    (r"^model\.(layers|norm)", r"\1"),
    (r"^model\.embed_tokens", "tok_embeddings"),
    (r"^lm_head", "output"),
    (r"self_attn\.(q|kv)_([ab])_proj", r"attention.w\1_\2"),
    (r"wkv_a_with_mqa|wkv_a\b", "wkv_a_with_mqa"),
    (r"self_attn\.(q|kv)_a_layernorm", r"attention.\1_a_norm"),
    (r"self_attn\.o_proj", "attention.wo"),
    (r"input_layernorm", "attention_norm"),
    (r"post_attention_layernorm", "ffn_norm"),
    (r"mlp\.(gate\.|experts|shared_experts)", r"\1"),
    (r"mlp\.", "feed_forward."),
    (r"gate_proj", "w1"),
    (r"down_proj", "w2"),
    (r"up_proj", "w3"),
)


def _mistral_names(weights: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Rename tensors, and split fused experts [E, 2 size, hidden] and [E, hidden, size]."""
    for name, tensor in weights.items():
        parts = {name: tensor}
        if name.endswith(".experts.gate_up_proj"):
            halves = zip(("gate_proj", "up_proj"), tensor.chunk(2, dim=1), strict=True)
            parts = {name.replace("gate_up_proj", half): each for half, each in halves}
        if ".experts." in name and tensor.ndim == 3:
            parts = {
                f"{whole[: whole.rindex('.')]}.{index}{whole[whole.rindex('.') :]}.weight": each.contiguous()
                for whole, experts in parts.items()
                for index, each in enumerate(experts)
            }
        for theirs, part in parts.items():
            for pattern, instead in MISTRAL_NAMES:
                theirs = re.sub(pattern, instead, theirs)
            yield theirs, part


def _publish_mistral_large(directory: Path) -> None:
    native = directory.parent / f"{directory.name}-native"
    publish_mistral(directory, native)
    shutil.rmtree(directory)
    mistral_layout.link_checkpoint(native, directory)


PUBLISHED = {
    "BailingMoeV2": _publish_ling,
    "Qwen3VLMoe": _publish_qwen3_vl_moe,
    "MistralLarge3": _publish_mistral_large,
}
