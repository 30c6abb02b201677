"""Reads a checkpoint's config.json with the family that it names. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from weft.errors import BadCheckpoint
from weft.file_io import foreign_path, path_exists
from weft.model.fields import Fields, read_eos, read_json
from weft.model.quantization import read_quantization
from weft.model.spec import Activation
from weft.model.spec import ModelConfig as ModelConfig
from weft.model.spec import Rope as Rope
from weft.model.tensors import expected_tensors as expected_tensors
from weft.model.tensors import is_ignored as is_ignored
from weft.tokenizer import read_end_token

# Module below `weft.model` and function that read the config of an architecture. Only one is imported.
FAMILIES = {
    "LlamaForCausalLM": ("fields", "read_common"),
    "MistralForCausalLM": ("families.mistral", "read"),
    "MinistralForCausalLM": ("families.mistral", "read"),
    "Qwen2ForCausalLM": ("families.qwen", "read_qwen2"),
    "Qwen3ForCausalLM": ("families.qwen", "read_qwen3"),
    "MixtralForCausalLM": ("families.mixtral", "read"),
    "Qwen3MoeForCausalLM": ("families.qwen", "read_qwen3_moe"),
    "SmolLM3ForCausalLM": ("families.smollm3", "read"),
    "Llama4ForCausalLM": ("families.llama4", "read"),
    "Llama4ForConditionalGeneration": ("families.llama4", "read_wrapped"),
    "DeepseekV3ForCausalLM": ("families.deepseek", "read"),
    "Gemma3ForCausalLM": ("families.gemma3", "read"),
    "Gemma3ForConditionalGeneration": ("families.gemma3", "read_wrapped"),
    "Glm4ForCausalLM": ("families.glm", "read"),
    "Glm4MoeForCausalLM": ("families.glm", "read_moe"),
    "Glm4MoeLiteForCausalLM": ("families.latent", "read_glm_lite"),
    "MiniMaxM2ForCausalLM": ("families.minimax", "read"),
    "Phi3ForCausalLM": ("families.phi3", "read"),
    "Olmo2ForCausalLM": ("families.olmo", "read_olmo2"),
    "Olmo3ForCausalLM": ("families.olmo", "read_olmo3"),
    "HYV3ForCausalLM": ("families.hunyuan", "read_hy3"),
    "Ernie4_5_MoeForCausalLM": ("families.ernie", "read_moe"),
    "GptOssForCausalLM": ("families.gpt_oss", "read"),
    "SeedOssForCausalLM": ("families.near_llama", "read_seed"),
    "Ernie4_5ForCausalLM": ("families.ernie", "read"),
    "GraniteForCausalLM": ("families.granite", "read"),
    "Exaone4ForCausalLM": ("families.exaone", "read"),
    "Mistral3ForConditionalGeneration": ("families.mistral", "read_wrapped"),
    "Ministral3ForCausalLM": ("families.mistral", "read_ministral3"),
    "Qwen2_5_VLForConditionalGeneration": ("families.qwen_vl", "read_qwen2_5_vl"),
    "Qwen3VLForConditionalGeneration": ("families.qwen_vl", "read_qwen3_vl"),
    "Qwen3VLMoeForConditionalGeneration": ("families.qwen_vl", "read_qwen3_vl_moe"),
    "HunYuanDenseV1ForCausalLM": ("families.hunyuan", "read_v1"),
    "HunYuanMoEV1ForCausalLM": ("families.hunyuan", "read_v1_moe"),
    "Mistral4ForCausalLM": ("families.mistral4", "read"),
    "MistralLarge3ForCausalLM": ("families.mistral4", "read_own_layout"),
    "BailingMoeV2ForCausalLM": ("families.ling", "read"),
    "MellumForCausalLM": ("families.laguna", "read_mellum"),
    "LagunaForCausalLM": ("families.laguna", "read"),
    "AfmoeForCausalLM": ("families.afmoe", "read"),
    "GraniteMoeSharedForCausalLM": ("families.granite", "read_shared"),
    "HyperCLOVAXForCausalLM": ("families.granite", "read_hyperclovax"),
    "CwmForCausalLM": ("families.near_llama", "read_cwm"),
    "ExaoneMoeForCausalLM": ("families.exaone", "read_moe"),
    "GemmaForCausalLM": ("families.gemma3", "read_gemma"),
    "YoutuForCausalLM": ("families.latent", "read_youtu"),
    "Jais2ForCausalLM": ("families.starcoder", "read_jais"),
    "StableLmForCausalLM": ("families.starcoder", "read_stablelm"),
    "Starcoder2ForCausalLM": ("families.starcoder", "read_starcoder"),
    "NemotronForCausalLM": ("families.starcoder", "read_nemotron"),
    "ArceeForCausalLM": ("families.starcoder", "read_arcee"),
    "CohereForCausalLM": ("families.cohere", "read"),
    "Cohere2ForCausalLM": ("families.cohere", "read_windowed"),
    "HeliumForCausalLM": ("families.near_llama", "read_helium"),
    "Qwen2MoeForCausalLM": ("families.qwen", "read_qwen2_moe"),
    "SolarOpenForCausalLM": ("families.glm", "read_solar"),
    "Dots1ForCausalLM": ("families.glm", "read_dots"),
    "OlmoeForCausalLM": ("families.olmo", "read_olmoe"),
    "FlexOlmoForCausalLM": ("families.olmo", "read_flex_olmo"),
    "GraniteMoeForCausalLM": ("families.granite", "read_moe"),
    "KimiK25ForConditionalGeneration": ("families.deepseek", "read_wrapped"),
    "Kimi_K25ForConditionalGeneration": ("families.deepseek", "read_wrapped"),
}
MAX_EXPERTS = 100_000  # of all layers together; each has its own tensors
# Fields and kinds of layers that only models with recurrent layers have, by transformers' names.
STATE_FIELDS = {
    *("linear_num_value_heads", "linear_attn_config", "mamba_d_state", "mamba_num_heads", "ssm_cfg", "ssm_state_size"),
    *("state_size", "conv_L_cache", "lru_width", "attention_hidden_size", "kda_num_heads", "xlstm_block_type"),
}
STATE_LAYERS = {"linear_attention", "mamba", "mamba2", "conv", "recurrent", "lightning_attention"}
# Ends of class names, and why a model of this kind is not served; the first one counts.
ENDINGS = (
    (r"For(MaskedLM|PreTraining|\w*Classification|QuestionAnswering|CTC|\w*Detection)", "writes no text"),
    (r"(?<!Chat)(?<!GLM)(?<!Head)(Model|ModelWithProjection)", "computes embeddings and writes no text"),
)


def read_config(model_dir: Path) -> ModelConfig:
    """Read `config.json` of a Hugging Face checkpoint directory, with the end tokens of its other files.

    Raises BadCheckpoint naming file and field, StorageUnavailable where the disk fails.
    """
    if not path_exists(model_dir / "config.json"):
        where = f"{model_dir / 'config.json'}: no such file: the directory" if model_dir.is_dir() else f"{model_dir}"
        raise BadCheckpoint(f"{where} {foreign_path(model_dir)}")
    generation = model_dir / "generation_config.json"
    # Chat tuning updates any one of the three files and leaves the others as the base model had them.
    others = read_eos(read_json(generation)) if path_exists(generation) else ()
    end = read_end_token(model_dir)
    return config_of(read_fields(model_dir), (*others, *(end.ids if end else ())))


def read_fields(model_dir: Path) -> Fields:
    """Read `config.json`, and the quantization that older ModelOpt writes into a file of its own."""
    fields, beside = read_json(model_dir / "config.json"), model_dir / "hf_quant_config.json"
    if fields.values.get("compression_config"):  # the field's name in older versions of compressed-tensors
        fields.values.setdefault("quantization_config", fields.values["compression_config"])
    if not fields.values.get("quantization_config") and path_exists(beside):
        quantization = read_json(beside).nested("quantization").values
        if quantization.get("quant_algo"):
            fields.values["quantization_config"] = {"quant_method": "modelopt", **quantization}
    return fields


def config_of(fields: Fields, eos: tuple[int, ...] = ()) -> ModelConfig:
    """Return what config.json says, with further end tokens `eos` of other files. Raises BadCheckpoint."""
    module, function = FAMILIES[_architecture(fields)]
    read: Callable[[Fields], ModelConfig] = getattr(import_module(f"weft.model.{module}"), function)
    config = replace(read(fields), quantization=read_quantization(_text_fields(fields)))
    for rotated in (config.rotated_dim, config.local_rotated_dim):
        if rotated % 2:
            raise fields.error("head_dim", f"must be even for rotary embeddings, found {rotated}")
    how, has_fused = config.quantization, config.experts is not None and config.experts.is_fused
    if how is not None and how.is_of_experts and not has_fused:
        what = f"mxfp4 is not supported in a {config.architecture}; take the checkpoint in BF16"
        raise fields.error("quantization_config.quant_method", what)
    if experts := config.experts:
        if config.activation is not Activation.SILU:
            raise fields.error("hidden_act", f"experts need silu, found {config.activation}")
        if experts.top_k > experts.num_experts:
            raise fields.error("num_experts_per_tok", f"{experts.top_k} of {experts.num_experts} experts")
        number = experts.num_experts * sum(layer.has_experts for layer in config.layers)
        if number > MAX_EXPERTS:
            raise fields.error("num_hidden_layers", f"expected at most {MAX_EXPERTS} experts in all, found {number}")
    # A wrapped model's text model names end tokens of its own.
    named = (*config.eos_token_ids, *read_eos(fields), *read_eos(fields.nested("text_config")), *eos)
    known = range(config.vocab_size)
    return replace(config, eos_token_ids=tuple(dict.fromkeys(each for each in named if each in known)))


def _text_fields(fields: Fields) -> Fields:
    return fields.text_config() if fields.values.get("text_config") else fields


def _architecture(fields: Fields) -> str:
    names = fields.values.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise fields.error("architectures", f"expected a list of names, found {names!r}")
    if names[0] not in FAMILIES:
        families = dict.fromkeys(re.sub("For(CausalLM|ConditionalGeneration)$", "", name) for name in FAMILIES)
        why = _unserved_kind(fields, names[0])
        what = f"{names[0]} is not supported{f' ({why})' if why else ''}; take a model of these families"
        raise fields.error("architectures", f"{what}: {', '.join(families)}")
    return names[0]


def _unserved_kind(fields: Fields, name: str) -> str:
    """Return what such a model does that Weft does not; empty if that is unknown."""
    for ending, what in ENDINGS:
        if re.search(f"{ending}$", name):
            return f"it {what}"
    if fields.values.get("is_encoder_decoder"):
        return "it is an encoder-decoder"
    text = _text_fields(fields)
    said = {each for each, value in text.values.items() if value is not None}
    kinds = text.values.get("layer_types") or text.values.get("layers_block_type") or ()
    if STATE_FIELDS & said or STATE_LAYERS.intersection(map(str, kinds)):
        return "some of its layers keep a state in place of keys and values"
    if "index_topk" in said:
        return "its attention is sparse: an indexer chooses the keys"
    senses = {"vision_config", "vision", "visual", "audio_config", "thinker_config"} & fields.values.keys()
    return "it reads images or sound" if senses else ""
