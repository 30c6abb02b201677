"""Gives a checkpoint in Mistral's own layout (params.json, consolidated.*, tekken.json) the files of Hugging Face's.

No weights are copied: the new directory links to them. Names of fields and tensors are those of the published
checkpoints of Mistral Large 3 and Mistral Small 4; vLLM reads the same layout.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from weft.errors import BadCheckpoint
from weft.model.fields import Fields, read_json
from weft.weights.checkpoint import INDEX_FILE, SINGLE_FILE, read_checkpoint, stored_tensors
from weft.weights.draft_checkpoint import BESIDE

PARAMS, SINGLE = "params.json", "consolidated.safetensors"
SMALL_FILES = (
    *("tekken.json", "tokenizer.json", "tokenizer_config.json"),
    *("chat_template.jinja", "generation_config.json"),
)
FIELDS = {
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "norm_eps": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
}
SAME_FIELDS = (
    *("vocab_size", "max_position_embeddings", "q_lora_rank", "kv_lora_rank"),
    *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
)
MOE_FIELDS = {
    "route_every_n": "moe_layer_freq",
    "first_k_dense_replace": "first_k_dense_replace",
    "num_experts_per_tok": "num_experts_per_tok",
    "num_experts": "n_routed_experts",
    "expert_hidden_dim": "moe_intermediate_size",
    "routed_scale": "routed_scaling_factor",
    "num_shared_experts": "n_shared_experts",
    "num_expert_groups": "n_group",
    "num_expert_groups_per_tok": "topk_group",
}
END_TOKEN = 2  # `</s>` in every tokenizer of Mistral's


def is_mistral_layout(directory: Path) -> bool:
    return (directory / PARAMS).is_file() and not (directory / "config.json").exists()


def link_checkpoint(directory: Path, out: Path) -> None:
    """Create the directory `out`, complete or not at all. Raises BadCheckpoint, StorageUnavailable, OSError."""
    if os.path.lexists(out):
        raise BadCheckpoint(f"{out}: exists already; remove it or name another directory")
    if not out.parent.is_dir():
        raise BadCheckpoint(f"{out.parent}: no such directory; create it or name another one")
    config = config_fields(read_json(directory / PARAMS))
    files = sorted(each.name for each in directory.glob("consolidated*.safetensors"))
    if not files:
        raise BadCheckpoint(f"{directory}: has no consolidated*.safetensors; download what is missing")
    tensors = stored_tensors(directory, files)
    _skip_plain_modules(config, set(tensors))
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
        made = Path(scratch) / out.name
        made.mkdir()
        (made / "config.json").write_text(json.dumps(config, indent=2))
        if files != [SINGLE]:
            weight_map = {name: source.file.name for name, source in tensors.items()}
            (made / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}, indent=1))
        for name in (*files, *SMALL_FILES, BESIDE):
            if (directory / name).exists():
                (made / (SINGLE_FILE if name == SINGLE else name)).symlink_to((directory / name).resolve())
        try:
            read_checkpoint(made)
        except BadCheckpoint as error:
            raise BadCheckpoint(str(error).replace(str(made.absolute()), str(directory))) from error
        os.rename(made, out)


def config_fields(params: Fields) -> dict[str, Any]:
    """Return the fields of config.json. Raises BadCheckpoint for other models than Large 3 and Small 4."""
    moe, values = params.nested("moe"), params.values
    if not moe.values.get("num_shared_experts") or not values.get("kv_lora_rank"):
        what = "only Mistral Large 3 and Small 4 are read in this layout"
        raise params.error("moe", f"{what}; take the checkpoint in the format of Hugging Face (model*.safetensors)")
    fields = {theirs: values[ours] for ours, theirs in FIELDS.items() if ours in values}
    fields |= {name: values[name] for name in SAME_FIELDS if name in values}
    fields |= {theirs: moe.values[ours] for ours, theirs in MOE_FIELDS.items() if ours in moe.values}
    return {
        "architectures": ["MistralLarge3ForCausalLM"],
        "max_position_embeddings": 128_000,
        "eos_token_id": END_TOKEN,
        "rope_parameters": _rope(params),
        **fields,
        **_quantization(params),
    }


def _rope(params: Fields) -> dict[str, Any]:
    """Return rotation and growth of queries. `apply_scale`: scores grow with the context as in DeepSeek-V3."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": params.number("rope_theta", 10_000.0)}
    if params.values.get("yarn"):
        yarn = params.nested("yarn")
        rope |= {
            "rope_type": "yarn",
            "factor": yarn.number("factor"),
            "original_max_position_embeddings": yarn.integer("original_max_position_embeddings"),
            "beta_fast": yarn.number("beta", 32.0),
            "beta_slow": yarn.number("alpha", 1.0),
        }
        rope |= (
            {"mscale": 1.0, "mscale_all_dim": 1.0} if yarn.boolean("apply_scale", True) else {"attention_factor": 1.0}
        )
    if params.values.get("llama_4_scaling"):
        growth = params.nested("llama_4_scaling")
        original = growth.integer("original_max_position_embeddings")
        if rope.setdefault("original_max_position_embeddings", original) != original:
            raise growth.error("original_max_position_embeddings", "must equal that of yarn")
        rope["llama_4_scaling_beta"] = growth.number("beta")
    return rope


def _quantization(params: Fields) -> dict[str, Any]:
    how = params.nested("quantization")
    if how.values.get("quant_method"):
        return {"quantization_config": {**how.values, "quant_method": "compressed-tensors"}}
    if not how.values:
        return {}
    how.choice("qformat_weight", ("fp8_e4m3",), "")
    scheme = "dynamic" if how.values.get("qscheme_act") == "NO_SCALES" else "static"
    return {"quantization_config": {"quant_method": "fp8", "activation_scheme": scheme, "scale_name": "qscale_weight"}}


def _skip_plain_modules(config: dict[str, Any], names: set[str]) -> None:
    """Name the modules that are not quantized as the files have them: lists in this layout use other names."""
    if (how := config.get("quantization_config")) is None:
        return
    field, packed = ("modules_to_not_convert", "qscale_weight") if how["quant_method"] == "fp8" else ("ignore", "")
    modules = [name.removesuffix(".weight") for name in sorted(names) if name.endswith(".weight")]
    scales = (packed,) if packed else ("weight_scale", "weight_packed")
    how[field] = [each for each in modules if not any(f"{each}.{scale}" in names for scale in scales)]
