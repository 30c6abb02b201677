"""What GGUF calls Llamas and their relatives: names of tensors, and metadata as the fields of a config.json."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.gguf_import.gguf_file import GgufModel
from weft.model.fields import FULL, SLIDING, Fields

ROPE_FACTORS = "rope_freqs.weight"
BECOME_FIELDS = (ROPE_FACTORS, "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that config.json has as numbers."""
TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{expert}.gate_proj",
    "ffn_up_exps": "mlp.experts.{expert}.up_proj",
    "ffn_down_exps": "mlp.experts.{expert}.down_proj",
}
MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
}
POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
SEED = {"post_attention_norm": "post_attention_layernorm"}
GEMMA3 = {**POST_NORMS, "ffn_norm": "pre_feedforward_layernorm"}
GLM4 = {
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": "mlp.gate_up_proj",
}
PHI3 = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
GEMMA3_27B_LAYERS, EXAONE4_32B_LAYERS = 62, 64
LLAMA3 = 1.0, 4.0, 8192
"""Low and high frequency factor and original context of all published Llamas."""
YARN = {"attn_factor": "attention_factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow"}
Values = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture by the name of its class in transformers.

    layer: names of its tensors where they differ from a Llama's.
    is_permuted: rows of queries and keys lie in pairs, as llama.cpp rotates a Llama's.
    norm_offset: llama.cpp adds this to the weights of norms.
    local_theta: layers with a window have a rotary embedding of their own, with this base unless the file has one; 0
    is the base of the other layers.
    more: returns further fields of config.json; gets the model and the prefix of the architecture's own keys.
    """

    name: str
    model_type: str
    layer: Mapping[str, str] = field(default_factory=dict)
    is_permuted: bool = False
    norm_offset: float = 0.0
    local_theta: float | None = None
    more: Callable[[GgufModel, str], Values] = lambda model, prefix: {}


def _mixtral(model: GgufModel, prefix: str) -> Values:
    return {
        "num_local_experts": model.fields.count(prefix + "expert_count"),
        "num_experts_per_tok": model.fields.integer(prefix + "expert_used_count"),
    }


def _mistral3(model: GgufModel, prefix: str) -> Values:
    """Read Ministral 3: queries grow beyond the original context. Mistral Small 3 has none of this."""
    fields, key = model.fields, prefix + "attention.temperature_scale"
    if not fields.values.get(key):
        return {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    weight = shortest(fields.number(prefix + "rope.scaling.yarn_log_multiplier", 1.0))
    growth = {"llama_4_scaling_beta": shortest(fields.number(key)), "mscale": weight, "mscale_all_dim": weight}
    rope = _rope(model, prefix, None)
    scaling = rope["rope_scaling"] or {"rope_type": "default"}
    return {"rope_scaling": None, "rope_parameters": {"rope_theta": rope["rope_theta"], **scaling, **growth}}


def _qwen3_moe(model: GgufModel, prefix: str) -> Values:
    return {
        "num_experts": model.fields.count(prefix + "expert_count"),
        "num_experts_per_tok": model.fields.integer(prefix + "expert_used_count"),
        "moe_intermediate_size": model.fields.integer(prefix + "expert_feed_forward_length"),
        # llama.cpp always does; published checkpoints do too.
        "norm_topk_prob": True,
    }


def _granite(model: GgufModel, prefix: str) -> Values:
    names = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    return {name: shortest(model.fields.number(prefix + key, 1.0)) for name, key in names.items()}


def _gemma3(model: GgufModel, prefix: str) -> Values:
    fields = model.fields
    num_layers = fields.count(prefix + "block_count")
    head_dim = fields.integer(prefix + "attention.key_length")
    if num_layers == GEMMA3_27B_LAYERS:  # as in llama.cpp, which has no key for it
        head_dim = fields.integer(prefix + "embedding_length") // fields.integer(prefix + "attention.head_count")
    return {
        **_windows(fields, prefix, period=6),
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": head_dim,
        "final_logit_softcapping": fields.values.get(prefix + "final_logit_softcapping"),
    }


def _olmo3(model: GgufModel, prefix: str) -> Values:
    return _windows(model.fields, prefix, period=4)


def _exaone4(model: GgufModel, prefix: str) -> Values:
    """Only the model with 64 layers has windows: llama.cpp goes by that."""
    is_large = model.fields.count(prefix + "block_count") == EXAONE4_32B_LAYERS
    return _windows(model.fields, prefix, period=4, default=4096 if is_large else 0)


def _windows(fields: Fields, prefix: str, period: int, default: int = 0) -> Values:
    """Return which layers have a window: as listed, else all but each of the last of `period` layers."""
    window = fields.integer(prefix + "attention.sliding_window", default, least=0)
    num_layers = fields.count(prefix + "block_count")
    listed = fields.values.get(prefix + "attention.sliding_window_pattern")
    if not isinstance(listed, list) or len(listed) != num_layers:
        listed = [(index + 1) % period != 0 for index in range(num_layers)]
    kinds = [SLIDING if window and each else FULL for each in listed]
    return {"sliding_window": window or None, "layer_types": kinds}


def _glm4(model: GgufModel, prefix: str) -> Values:
    return {"attention_bias": "blk.0.attn_q.bias" in model.tensors, **_rotated_part(model.fields, prefix)}


def _phi3(model: GgufModel, prefix: str) -> Values:
    fields = model.fields
    values = {
        "sliding_window": fields.integer(prefix + "attention.sliding_window", 0, least=0) or None,
        "original_max_position_embeddings": fields.integer(
            prefix + "rope.scaling.original_context_length", fields.integer(prefix + "context_length")
        ),
        **_rotated_part(fields, prefix),
    }
    factors = [model.tensors.get(f"rope_factors_{name}.weight") for name in ("short", "long")]
    if all(factors):
        short, long = ([shortest(float(each)) for each in tensor.data] for tensor in factors if tensor)
        values["rope_scaling"] = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    return values


def _rotated_part(fields: Fields, prefix: str) -> Values:
    heads = fields.integer(prefix + "attention.head_count")
    head_dim = fields.integer(prefix + "attention.key_length", fields.integer(prefix + "embedding_length") // heads)
    return {"partial_rotary_factor": fields.integer(prefix + "rope.dimension_count", head_dim) / head_dim}


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", "llama", is_permuted=True),
    "mixtral": Architecture("MixtralForCausalLM", "mixtral", MIXTRAL, is_permuted=True, more=_mixtral),
    "mistral3": Architecture("Ministral3ForCausalLM", "ministral3", is_permuted=True, more=_mistral3),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", "qwen3_moe", more=_qwen3_moe),
    "smollm3": Architecture("SmolLM3ForCausalLM", "smollm3", is_permuted=True),
    "granite": Architecture("GraniteForCausalLM", "granite", is_permuted=True, more=_granite),
    "seed_oss": Architecture("SeedOssForCausalLM", "seed_oss", SEED),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM", "ernie4_5"),
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2", POST_NORMS),
    "olmo3": Architecture("Olmo3ForCausalLM", "olmo3", POST_NORMS, local_theta=0.0, more=_olmo3),
    "exaone4": Architecture("Exaone4ForCausalLM", "exaone4", POST_NORMS, more=_exaone4),
    "gemma3": Architecture(
        "Gemma3ForCausalLM", "gemma3_text", GEMMA3, norm_offset=1.0, local_theta=10_000.0, more=_gemma3
    ),
    "glm4": Architecture("Glm4ForCausalLM", "glm4", GLM4, more=_glm4),
    "phi3": Architecture("Phi3ForCausalLM", "phi3", PHI3, more=_phi3),
}
SHARED_NAMES = {
    "llama": ("mixtral", "llama.expert_count"),
    "olmo2": ("olmo3", "olmo2.attention.sliding_window"),
}
"""Architectures that are another one if they have a key."""


def architecture_of(model: GgufModel) -> Architecture:
    """Return the architecture. Raises BadCheckpoint for one that Weft does not convert."""
    name = model.architecture
    other, key = SHARED_NAMES.get(name, ("", ""))
    if model.fields.values.get(key):
        name = other
    if name not in ARCHITECTURES:
        raise model.error(f"architecture {name!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    return ARCHITECTURES[name]


def config_fields(model: GgufModel, architecture: Architecture) -> Values:
    """Return the fields of config.json but for dtype and special tokens. Raises BadCheckpoint naming the key."""
    fields, prefix = model.fields, model.architecture + "."
    hidden, heads = fields.integer(prefix + "embedding_length"), fields.integer(prefix + "attention.head_count")
    embedding = model.tensors.get("token_embd.weight")
    if embedding is None:
        raise model.error("tensor token_embd.weight is missing; this is not a whole model")
    return {
        "architectures": [architecture.name],
        "model_type": architecture.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": fields.integer(prefix + "feed_forward_length", hidden),
        "num_hidden_layers": fields.count(prefix + "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer(prefix + "attention.head_count_kv", heads),
        "head_dim": fields.integer(prefix + "attention.key_length", hidden // heads),
        "hidden_act": "silu",
        "max_position_embeddings": fields.integer(prefix + "context_length"),
        "rms_norm_eps": shortest(fields.number(prefix + "attention.layer_norm_rms_epsilon")),
        **_rope(model, prefix, architecture.local_theta),
        "tie_word_embeddings": "output.weight" not in model.tensors,
        **architecture.more(model, prefix),
    }


def shortest(value: float) -> float:
    """Return the shortest decimal number that is the same float32: GGUF has 1e-5 as 9.999999747378752e-06."""
    if not math.isfinite(value) or abs(value) > 3e38:  # no float32; the reader of config.json refuses it
        return value
    packed = struct.pack("<f", value)
    found = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next(each for each in found if struct.pack("<f", each) == packed)


def _rope(model: GgufModel, prefix: str, local_theta: float | None) -> Values:
    theta = shortest(model.fields.number(prefix + "rope.freq_base", 10_000.0))
    scaling = _rope_scaling(model, prefix)
    if local_theta is None:
        return {"rope_theta": theta, "rope_scaling": scaling}
    local = shortest(model.fields.number(prefix + "rope.freq_base_swa", local_theta or theta))
    full = {"rope_type": "default", "rope_theta": theta, **(scaling or {})}
    return {"rope_parameters": {FULL: full, SLIDING: {"rope_type": "default", "rope_theta": local}}}


def _rope_scaling(model: GgufModel, prefix: str) -> Values | None:
    fields = model.fields
    if ROPE_FACTORS in model.tensors:
        return _llama3(model, prefix)
    kind = fields.choice(prefix + "rope.scaling.type", ("none", "linear", "yarn", "longrope"), "none")
    if kind in ("none", "longrope"):  # Phi reads longrope itself
        return None
    scaling: Values = {"rope_type": kind, "factor": shortest(fields.number(prefix + "rope.scaling.factor"))}
    if kind == "yarn":
        original = fields.integer(prefix + "rope.scaling.original_context_length")
        scaling["original_max_position_embeddings"] = original
        for name in YARN:
            if fields.values.get(key := f"{prefix}rope.scaling.yarn_{name}") is not None:
                scaling[YARN[name]] = shortest(fields.number(key))
    return scaling


def _llama3(model: GgufModel, prefix: str) -> Values:
    """Recover the parameters of Llama 3.1 and later: GGUF has only the factor of each pair of a head."""
    stored = [float(each) for each in model.tensors[ROPE_FACTORS].data]
    theta = model.fields.number(prefix + "rope.freq_base", 10_000.0)
    factor, low, high, original = shortest(max(stored)), *LLAMA3
    expected = []
    for index in range(len(stored)):
        turns = original * theta ** (-index / len(stored)) / (2 * math.pi)
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        expected.append(1 / ((1 - smooth) / factor + smooth))
    if not all(math.isclose(*pair, rel_tol=1e-3) for pair in zip(stored, expected, strict=True)):
        raise model.error(f"tensor {ROPE_FACTORS}: these factors are not those of Llama 3; take another file")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }
