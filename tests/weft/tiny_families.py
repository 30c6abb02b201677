"""Tiny random models of every family as Hugging Face makes them, with their edges moved to where short texts reach."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.weft.published_layouts import PUBLISHED
from tests.weft.tiny_llama import LLAMA3_ROPE, WHOLE, Tiny
from weft.model.config import read_config

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
ODD = {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 10}
QWEN_MOE = {**HEADS, "head_dim": 10, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
LLAMA4 = {
    **HEADS,
    "head_dim": 12,
    "num_hidden_layers": 4,
    "intermediate_size": 24,
    "intermediate_size_mlp": 40,
    "num_local_experts": 3,
    "attention_chunk_size": 8,
    "floor_scale": 16,
    "attn_scale": 0.4,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
DEEPSEEK = {
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "num_nextn_predict_layers": 0,
}
LATENT = (
    *("num_attention_heads", "num_key_value_heads", "q_lora_rank", "kv_lora_rank"),
    *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
)
GEMMA3 = {
    **HEADS,
    "head_dim": 10,
    "sliding_window": 8,
    "query_pre_attn_scalar": 24,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 100_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    },
    "pad_token_id": 0,
}
GLM_MOE = {
    **HEADS,
    "head_dim": 12,
    "moe_intermediate_size": 20,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.5,
    "pad_token_id": 0,
    "num_mtp_layers": 0,
}
MINIMAX = {**HEADS, "head_dim": 12, "num_local_experts": 6, "num_experts_per_tok": 3, "rotary_dim": 6}
LONGROPE = {
    "original_max_position_embeddings": 8,  # transformers switches factors by length, and all texts are longer
    "head_dim": 10,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.8,
        "short_factor": [1.0, 1.1, 1.3, 1.4],
        "long_factor": [1.0, 1.7, 2.5, 4.0],
    },
}
OLMO3 = {
    **HEADS,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}},
    "pad_token_id": 0,
}
MINISTRAL3_ROPE = {**YARN, "llama_4_scaling_beta": 0.4, "original_max_position_embeddings": 16}
HY3 = {
    **HEADS,
    "head_dim": 10,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "pad_token_id": 0,
}
ERNIE_MOE = {
    **HEADS,
    "head_dim": 10,
    "moe_num_experts": 6,
    "moe_k": 3,
    "moe_intermediate_size": 20,
    "moe_num_shared_experts": 1,
    "tie_word_embeddings": False,
}
ALPHA = {"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 50.0, "factor": 1.0}
HUNYUAN = {**HEADS, "head_dim": 10, "rope_parameters": ALPHA, "pad_token_id": 0}
QWEN_VL = {**HEADS, "head_dim": 12, "rope_parameters": {"rope_theta": 500.0, "mrope_section": [3, 2, 1]}}
VISION = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1, "out_hidden_size": 40}
MISTRAL4_ROPE = {**MINISTRAL3_ROPE, "mscale": 1.0, "mscale_all_dim": 0.7}
MISTRAL_LARGE_ROPE = {**MINISTRAL3_ROPE, "mscale": 1.0, "mscale_all_dim": 1.0}
EXPERTS = {**HEADS, "num_experts": 6, "num_experts_per_tok": 3, "pad_token_id": 0}
TWO_ROPES = {
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}},
}
GPT_OSS = {
    **HEADS,
    "head_dim": 10,
    "num_hidden_layers": 4,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "sliding_window": 8,
    "swiglu_limit": 0.8,  # which the experts reach
}
SCALED = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}

# name: family, what is not as in the others
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {**HEADS, **WHOLE, "rms_norm_eps": 1e-5}),
    "llama3": ("Llama", {**ODD, "rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {**HEADS, "head_dim": 10, "sliding_window": None}),
    "mistral-window": ("Mistral", {**HEADS, **WHOLE, "sliding_window": 8}),
    "ministral": (
        "Ministral",
        {
            **HEADS,
            "head_dim": 10,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "qwen2": ("Qwen2", {**HEADS, **WHOLE, "tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2",
        {**HEADS, **WHOLE, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen2-yarn": ("Qwen2", {**HEADS, "rope_parameters": YARN}),
    "qwen3": ("Qwen3", {**ODD, **WHOLE, "tie_word_embeddings": True}),
    "qwen3-yarn": ("Qwen3", {**HEADS, "head_dim": 16, "rope_parameters": {**YARN, "attention_factor": 1.3}}),
    "mixtral": ("Mixtral", {**HEADS, "num_local_experts": 5}),
    "mixtral-window": ("Mixtral", {**HEADS, "sliding_window": 8, "num_experts_per_tok": 1, "num_local_experts": 3}),
    "qwen3-moe": ("Qwen3Moe", {**QWEN_MOE, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen3-moe-raw": ("Qwen3Moe", {**QWEN_MOE, "norm_topk_prob": False, "decoder_sparse_step": 2}),
    "smollm3": ("SmolLM3", {**HEADS, **WHOLE, "num_hidden_layers": 4, "tie_word_embeddings": True, "pad_token_id": 0}),
    "smollm3-window": (
        "SmolLM3",
        {
            **HEADS,
            "use_sliding_window": True,
            "sliding_window": 8,
            "no_rope_layers": [0, 1, 0],
            "tie_word_embeddings": False,
            "pad_token_id": 0,
        },
    ),
    "llama4": ("Llama4", LLAMA4),
    "llama4-dense": (
        "Llama4",
        {**LLAMA4, "interleave_moe_layer_step": 2, "use_qk_norm": False, "rope_parameters": LLAMA3_ROPE},
    ),
    "llama4-plain": (
        "Llama4",
        {**LLAMA4, "num_experts_per_tok": 2, "attn_temperature_tuning": False, "no_rope_layers": [0, 1, 1, 0]},
    ),
    "deepseek": ("DeepseekV3", {**DEEPSEEK, "rope_parameters": SCALED}),
    "deepseek-plain": ("DeepseekV3", {**DEEPSEEK, "q_lora_rank": None, "norm_topk_prob": False}),
    "kimi-k2": (
        "DeepseekV3",
        {**DEEPSEEK, "n_group": 1, "topk_group": 1, "rope_parameters": {**SCALED, "factor": 8.0}},
    ),
    "deepseek-halves": ("DeepseekV3", {**DEEPSEEK, "rope_interleave": False, "n_shared_experts": 2}),
    # its embeddings grow by the square root of the width, and would drown the layers
    "gemma3": ("Gemma3", {**GEMMA3, "initializer_range": 0.03}),
    "gemma3-alike": (
        "Gemma3",
        {
            **GEMMA3,
            "query_pre_attn_scalar": 10,
            "layer_types": ["full_attention"] * 3,
            "tie_word_embeddings": False,
            "final_logit_softcapping": 5.0,
        },
    ),
    "glm4": ("Glm4", {**HEADS, "head_dim": 12, "pad_token_id": 0}),
    "glm4-plain": ("Glm4", {**HEADS, "head_dim": 8, "attention_bias": False, "pad_token_id": 0}),
    "glm4-moe": ("Glm4Moe", {**GLM_MOE, "use_qk_norm": True, "attention_bias": True}),
    "glm4-moe-raw": ("Glm4Moe", {**GLM_MOE, "norm_topk_prob": False, "n_shared_experts": 2}),
    "glm4-lite": ("Glm4MoeLite", {**DEEPSEEK, "n_group": 1, "topk_group": 1, "num_key_value_heads": 3}),
    "minimax-m2": ("MiniMaxM2", MINIMAX),
    "phi3": ("Phi3", {**HEADS, "sliding_window": 8, "pad_token_id": 0}),
    "phi3-longrope": ("Phi3", {**HEADS, "pad_token_id": 0, **LONGROPE}),
    "phi3-short": ("Phi3", {**HEADS, "pad_token_id": 0, **LONGROPE, "original_max_position_embeddings": 128}),
    "olmo2": ("Olmo2", {**HEADS, "pad_token_id": 0}),
    "olmo3": ("Olmo3", OLMO3),
    "seed-oss": ("SeedOss", {**HEADS, "head_dim": 10, "residual_dropout": 0.0, "attention_dropout": 0.0}),
    "hy3": ("HYV3", HY3),
    "ernie-moe": ("Ernie4_5_Moe", ERNIE_MOE),
    "ernie": ("Ernie4_5", {**HEADS, "head_dim": 10}),
    "gpt-oss": ("GptOss", {**GPT_OSS, "rope_parameters": {**YARN, "truncate": False}}),
    "gpt-oss-plain": (
        "GptOss",
        {
            **GPT_OSS,
            "head_dim": 16,
            "attention_bias": False,
            "layer_types": ["full_attention"] * 4,
            "swiglu_limit": 7.0,
        },
    ),
    "granite": (
        "Granite",
        {
            **HEADS,
            "embedding_multiplier": 3.0,
            "logits_scaling": 5.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
        },
    ),
    "exaone4": (
        "Exaone4",
        {**HEADS, "hidden_size": 48, "num_hidden_layers": 4, "sliding_window": 8, "sliding_window_pattern": 2},
    ),
    "exaone4-full": ("Exaone4", {**HEADS, "sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "ministral3": ("Ministral3", {**HEADS, "head_dim": 10, "rope_parameters": MINISTRAL3_ROPE, "pad_token_id": 0}),
    "mistral4": (
        "Mistral4",
        {**DEEPSEEK, "n_group": 1, "topk_group": 1, "rope_parameters": MISTRAL4_ROPE, "pad_token_id": 0},
    ),
    "mistral4-groups": (
        "Mistral4",
        {**DEEPSEEK, "rope_parameters": MISTRAL4_ROPE, "pad_token_id": 0, "initializer_range": 0.25},
    ),
    "mistral-large3": (
        "MistralLarge3",
        {**DEEPSEEK, "rope_parameters": MISTRAL_LARGE_ROPE, "pad_token_id": 0, "initializer_range": 0.25},
    ),
    "hunyuan": ("HunYuanDenseV1", {**HUNYUAN, "tie_word_embeddings": True}),
    "hunyuan-moe": ("HunYuanMoEV1", {**HUNYUAN, "num_experts": 6, "moe_topk": 3, "intermediate_size": 20}),
    "qwen2.5-vl": (
        "Qwen2_5_VL",
        {**HEADS, "rope_parameters": {"rope_type": "mrope", "rope_theta": 500.0, "mrope_section": [2, 2, 1]}},
    ),
    "qwen3-vl": ("Qwen3VL", QWEN_VL),
    "qwen3-vl-moe": (
        "Qwen3VLMoe",
        {**QWEN_MOE, **QWEN_VL, "num_experts_per_tok": 2, "mlp_only_layers": [0], "initializer_range": 0.3},
    ),
    "ling2": ("BailingMoeV2", {**GLM_MOE, "use_qk_norm": True, "n_routed_experts": 8, "n_group": 4, "topk_group": 2}),
    "mellum": ("Mellum", {**EXPERTS, **TWO_ROPES, "head_dim": 10, "moe_intermediate_size": 20}),
    "laguna": (
        "Laguna",
        {
            **EXPERTS,
            **TWO_ROPES,
            "rope_parameters": {
                "full_attention": {**YARN, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0},
            },
            "head_dim": 12,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 24,
            "num_attention_heads_per_layer": [6, 4, 6],
            "moe_routed_scaling_factor": 1.7,
        },
    ),
    "laguna-alike": (
        "Laguna",
        {
            **EXPERTS,
            "head_dim": 10,
            "moe_intermediate_size": 20,
            "gating": "per-element",
            "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 500.0}},
        },
    ),
    "trinity": (
        "Afmoe",
        {**EXPERTS, "head_dim": 10, "moe_intermediate_size": 20, "sliding_window": 8, "route_scale": 1.7},
    ),
    "trinity-mup": (
        "Afmoe",
        {
            **EXPERTS,
            "head_dim": 10,
            "moe_intermediate_size": 20,
            "sliding_window": 8,
            "global_attn_every_n_layers": 2,
            "mup_enabled": True,
            "initializer_range": 0.05,
        },
    ),
    "starcoder2": ("Starcoder2", {**HEADS, "sliding_window": 8, "initializer_range": 0.25}),
    "starcoder2-plain": (
        "Starcoder2",
        {**HEADS, "use_bias": False, "hidden_act": "gelu", "tie_word_embeddings": False, "initializer_range": 0.25},
    ),
    "nemotron": ("Nemotron", {**HEADS, "head_dim": 12, "attention_bias": True, "mlp_bias": True}),
    "arcee": ("Arcee", {**HEADS, "head_dim": 10}),
    "arcee-biased": ("Arcee", {**HEADS, "attention_bias": True, "mlp_bias": True}),
    "llama-biased": ("Llama", {**HEADS, "attention_bias": True, "mlp_bias": True}),
    "command-r": ("Cohere", {**HEADS, "logit_scale": 0.5}),
    "command-a": ("Cohere2", {**HEADS, "sliding_window": 8, "num_hidden_layers": 4, "tie_word_embeddings": False}),
    "jais2": ("Jais2", {**HEADS, "head_dim": 10, "attention_bias": True, "mlp_bias": True}),
    "stablelm": ("StableLm", {**HEADS, "hidden_size": 64, "use_qkv_bias": True}),
    "stablelm-parallel": (
        "StableLm",
        {**HEADS, "hidden_size": 64, "use_parallel_residual": True, "initializer_range": 0.25},
    ),
    "gemma1": ("Gemma", {**HEADS, "head_dim": 10, "initializer_range": 0.25}),
    "youtu": (
        "Youtu",
        {name: value for name, value in DEEPSEEK.items() if name in LATENT} | {"initializer_range": 0.25},
    ),
    "cwm": ("Cwm", {**HEADS, "head_dim": 10, "sliding_window": 8, "rope_parameters": LLAMA3_ROPE}),
    "hyperclovax": ("HyperCLOVAX", {**HEADS, "residual_multiplier": 0.4, "logits_scaling": 0.3}),
    "granite-moe-shared": (
        "GraniteMoeShared",
        {
            **HEADS,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "attention_multiplier": 0.3,
            "shared_intermediate_size": 24,
        },
    ),
    "k-exaone": (
        "ExaoneMoe",
        {
            **EXPERTS,
            "head_dim": 10,
            "moe_intermediate_size": 20,
            "sliding_window": 8,
            "sliding_window_pattern": 2,
            "num_hidden_layers": 4,
        },
    ),
    "helium": ("Helium", {**HEADS, "head_dim": 10}),
    "qwen2-moe": (
        "Qwen2Moe",
        {**EXPERTS, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 24, "mlp_only_layers": [1]},
    ),
    "solar-open": (
        "SolarOpen",
        {**HEADS, "head_dim": 10, "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20},
    ),
    "dots1": (
        "Dots1",
        {
            **{name: value for name, value in GLM_MOE.items() if name != "num_mtp_layers"},
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "sliding_window": 8,
            "max_window_layers": 2,
        },
    ),
    "olmoe": ("Olmoe", EXPERTS),
    "flex-olmo": ("FlexOlmo", {**EXPERTS, "norm_topk_prob": True}),
    "granite-moe": (
        "GraniteMoe",
        {**HEADS, "num_local_experts": 6, "num_experts_per_tok": 3, "attention_multiplier": 0.3, "logits_scaling": 4.0},
    ),
}
# Of these the text model, or the class that computes the same, has a config of another name.
CLASSES = {"Llama4": "Llama4Text", "Gemma3": "Gemma3Text", "BailingMoeV2": "Glm4Moe", "MistralLarge3": "Mistral4"}
# Classes of transformers that compute the same as families that have none there.
ORACLES = {"BailingMoeV2": "Glm4Moe", "MistralLarge3": "Mistral4"}
WRAPPED = ("Qwen2_5_VL", "Qwen3VL", "Qwen3VLMoe")  # transformers has a head only around text and vision together


@dataclass(frozen=True)
class TinyFamily(Tiny):
    """The weights come from the checkpoint: transformers keeps some in other shapes than it saves."""

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """What a weights service would map."""
        return load_file(self.directory / "model.safetensors")

    def _generate(self, prompt: list[int], num_tokens: int) -> list[int]:
        """Every token from the whole text: no cache of the oracle's takes part."""
        tokens = list(prompt)
        for _ in range(num_tokens):
            # longer than the original context of LONGROPE, at which transformers switches factors
            padded = tokens + [0] * max(0, 9 - len(tokens))
            tokens.append(int(self.logits(padded)[len(tokens) - 1].argmax()))
        return tokens[len(prompt) :]

    def is_greedy(self, prompt: list[int], tokens: list[int]) -> bool:
        """Would the oracle have chosen each of these tokens? By induction the same as `greedy`, in one pass."""
        return tokens == self.logits(prompt + tokens)[len(prompt) - 1 : -1].argmax(-1).tolist()


def make_family(name: str, directory: Path, **sizes: Any) -> TinyFamily:
    """Norms, biases and corrections are random too: their initial values would hide that they are left out.

    `sizes` are other fields of the config than those in `FAMILIES`.
    """
    family, changes = copy.deepcopy(FAMILIES[name])  # transformers writes into nested objects
    torch.manual_seed(13)
    common: dict[str, Any] = {"vocab_size": 113, "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 3}
    common |= {"max_position_embeddings": 128, "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2}
    oracle = _make_oracle(family, {**common, **changes, **sizes})
    oracle.eval()
    with torch.no_grad():
        for tensor in [*oracle.parameters(), *(each for _, each in oracle.named_buffers() if each.ndim == 1)]:
            if tensor.ndim == 1 and tensor.dtype == torch.float32 and _is_learned(oracle, tensor):
                tensor += 0.3 * torch.randn_like(tensor)
            elif tensor.ndim == 3 or (tensor.ndim == 2 and not tensor.any()):  # fused experts: some start as zeros
                tensor.normal_(0, 0.2)
    oracle.save_pretrained(directory)
    if family in PUBLISHED:
        PUBLISHED[family](directory)
    return TinyFamily(oracle, directory, read_config(directory))


def _make_oracle(family: str, values: dict[str, Any]) -> Any:
    make_config = getattr(transformers, CLASSES.get(family, family) + "Config")
    if family not in WRAPPED:
        name = ORACLES.get(family, family)
        return getattr(transformers, name + "ForCausalLM")(make_config(**values))
    vision = {**VISION, "deepstack_visual_indexes": [], "num_position_embeddings": 16}
    config = make_config(text_config=values, vision_config=vision)
    return getattr(transformers, family + "ForConditionalGeneration")(config)


def wrap(tiny: TinyFamily, architecture: str, directory: Path) -> TinyFamily:
    """The same text model inside one that sees images, as it is published."""
    config = json.loads((tiny.directory / "config.json").read_text())
    outer = {"architectures": [architecture], "text_config": config, "eos_token_id": config.pop("eos_token_id")}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(outer))
    vision = {"vision_model.patch.weight": torch.ones(2, 2)}
    if architecture.startswith("Kimi"):
        vision = {"vision_tower.patch.weight": torch.ones(2, 2), "mm_projector.0.bias": torch.ones(2)}
    if architecture.startswith(("Gemma3", "Mistral3")):
        vision = {"vision_tower.patch.weight": torch.ones(2, 2), "multi_modal_projector.norm.weight": torch.ones(2)}
    save_file(
        {**{"language_model." + k: v for k, v in tiny.weights.items()}, **vision}, directory / "model.safetensors"
    )
    return replace(tiny, directory=directory, config=read_config(directory))


def _is_learned(oracle: Any, tensor: torch.Tensor) -> bool:
    """Saved with the model, unlike rotary frequencies."""
    return any(tensor.data_ptr() == each.data_ptr() for each in oracle.state_dict().values())
