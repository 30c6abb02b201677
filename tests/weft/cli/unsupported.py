"""Checkpoints that Weft does not serve, as their tools write them; `weft up` rejects each in one line.

Configurations of architectures are those of transformers' classes, or the published fields where it has no class.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers import AutoConfig

NANO = Path(__file__).parents[3] / "models" / "weft-nano"
STATE, SENSES = "keep a state in place of keys and values", "reads images or sound"
UNKNOWN = "is not supported; take"  # without a reason
FAMILIES = "take a model of these families: Llama, Mistral"
INSTEAD = "take the checkpoint in BF16, or one in another format"
Write = Callable[[Path], Path]
"""Makes a checkpoint of a copy of weft-nano; returns the path to serve."""

# architecture, transformers' model_type, and why it is not served
ARCHITECTURES: list[tuple[str, str, str]] = [
    ("Qwen3_5ForConditionalGeneration", "qwen3_5", STATE),
    ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", STATE),
    ("Qwen3NextForCausalLM", "qwen3_next", STATE),
    ("NemotronHForCausalLM", "nemotron_h", STATE),
    ("Lfm2ForCausalLM", "lfm2", STATE),
    ("KimiLinearForCausalLM", "kimi_linear", STATE),
    ("GraniteMoeHybridForCausalLM", "granitemoehybrid", STATE),
    ("MambaForCausalLM", "mamba", STATE),
    ("Mamba2ForCausalLM", "mamba2", STATE),
    ("FalconH1ForCausalLM", "falcon_h1", STATE),
    ("JambaForCausalLM", "jamba", STATE),
    ("Zamba2ForCausalLM", "zamba2", STATE),
    ("RwkvForCausalLM", "rwkv", STATE),
    ("RecurrentGemmaForCausalLM", "recurrent_gemma", STATE),
    ("MiniMaxForCausalLM", "minimax", STATE),
    ("DeepseekV32ForCausalLM", "deepseek_v32", "sparse"),
    ("GlmMoeDsaForCausalLM", "glm_moe_dsa", "sparse"),
    ("DeepseekV4ForCausalLM", "deepseek_v4", "sparse"),
    ("Gemma4ForConditionalGeneration", "gemma4", SENSES),
    ("Gemma3nForConditionalGeneration", "gemma3n", SENSES),
    ("MiniMaxM3VLForConditionalGeneration", "minimax_m3_vl", SENSES),
    ("LlavaForConditionalGeneration", "llava", SENSES),
    ("Qwen2_5OmniForConditionalGeneration", "qwen2_5_omni", SENSES),
    ("T5ForConditionalGeneration", "t5", "encoder-decoder"),
    ("BartForConditionalGeneration", "bart", "encoder-decoder"),
    ("WhisperForConditionalGeneration", "whisper", "encoder-decoder"),
    ("BertForMaskedLM", "bert", "writes no text"),
    ("Qwen3ForSequenceClassification", "qwen3", "writes no text"),
    ("Wav2Vec2ForCTC", "wav2vec2", "writes no text"),
    ("CLIPModel", "clip", "computes embeddings"),
    ("Qwen3Model", "qwen3", "computes embeddings"),
    ("GPT2LMHeadModel", "gpt2", UNKNOWN),
    ("BloomForCausalLM", "bloom", UNKNOWN),
    ("OPTForCausalLM", "opt", UNKNOWN),
    ("GPTJForCausalLM", "gptj", UNKNOWN),
    ("MptForCausalLM", "mpt", UNKNOWN),
    ("CTRLLMHeadModel", "ctrl", UNKNOWN),
    ("BioGptForCausalLM", "biogpt", UNKNOWN),
]
# classes that only code beside the checkpoint defines
REMOTE: dict[str, tuple[dict[str, Any], str]] = {
    "RWKV7ForCausalLM": ({"model_type": "rwkv7", "attn_mode": "chunk", "decay_low_rank_dim": 64}, UNKNOWN),
    "ChatGLMModel": ({"model_type": "chatglm", "num_layers": 40, "multi_query_group_num": 2}, UNKNOWN),
    "InternVLChatModel": ({"model_type": "internvl_chat", "vision_config": {}, "llm_config": {}}, SENSES),
    "BaichuanForCausalLM": ({"model_type": "baichuan", "hidden_size": 5120, "vocab_size": 125_696}, UNKNOWN),
}
QUANTIZED: dict[str, tuple[dict[str, Any], str]] = {
    "bitsandbytes 8 bits": ({"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}, INSTEAD),
    "HQQ": ({"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64}}}, "'hqq'"),
    "Quark INT4": ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "uint4"}}}, "'uint4'"),
    "torchao": ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}}, "'torchao'"),
    "EETQ": ({"quant_method": "eetq", "weights": "int8"}, "'eetq'"),
    "AQLM": ({"quant_method": "aqlm", "num_codebooks": 1, "nbits_per_codebook": 16}, "'aqlm'"),
    "QuIP": ({"quant_method": "quip", "codebook": "E8P12"}, "'quip'"),
    "VPTQ": ({"quant_method": "vptq", "config_for_layers": {}}, "'vptq'"),
    "SpQR": ({"quant_method": "spqr", "bits": 3}, "'spqr'"),
    "HIGGS": ({"quant_method": "higgs", "bits": 4, "p": 2}, "'higgs'"),
    "BitNet": ({"quant_method": "bitnet"}, "'bitnet'"),
    "AutoRound": ({"quant_method": "auto-round", "bits": 2, "packing_format": "auto_round:exllamav2"}, "'auto-round'"),
    "EXL2": ({"quant_method": "exl2", "bits": 4.25}, "'exl2'"),
    "FP8 in e5m2": ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt: 'e5m2'"),
    "3 bits of GPTQ": ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "bits: 3"),
    "Marlin": ({"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {}}, "'marlin-24'"),
    "MXFP6": ({"quant_method": "compressed-tensors", "format": "mxfp6-quantized"}, "'mxfp6-quantized'"),
    "ModelOpt's AWQ": ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "'W4A8_AWQ'"),
    "MLX": ({"group_size": 64, "bits": 4, "mode": "affine"}, "Apple's MLX"),
}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
# files beside or in place of others (None: none), the path to serve, and words of the refusal
FILES: dict[str, tuple[dict[str, bytes | None], str, list[str]]] = {
    "a GGUF file": ({"m.gguf": b"GGUF\x03\0\0\0"}, "m.gguf", ["GGUF"]),
    "GGUF files": ({"m.gguf": b"GGUF\x03\0\0\0", "config.json": None}, "", ["GGUF"]),
    "ONNX": ({"model.onnx": b"\x08", "model.safetensors": None}, "", ["ONNX", "safetensors"]),
    "a pickle": ({"pytorch_model.bin": b"PK\x03\x04", "model.safetensors": None}, "", ["pickled", "convert"]),
    "Mistral's layout": (
        {"params.json": b"{}", "consolidated.safetensors": b"", "config.json": None},
        "",
        ["params.json", "Hugging Face"],
    ),
    "Git LFS pointers": ({"model.safetensors": POINTER}, "", ["model.safetensors", "git lfs pull"]),
    "an adapter": ({"adapter_config.json": b"{}", "config.json": None}, "", ["adapter", "merge"]),
    "a diffusion pipeline": ({"model_index.json": b"{}", "config.json": None}, "", ["diffusers", "language models"]),
    "a TensorFlow model": ({"tf_model.h5": b"\x89HDF", "model.safetensors": None}, "", ["TensorFlow", "safetensors"]),
    "a TensorRT engine": ({"rank0.engine": b"ftrt", "model.safetensors": None}, "", ["TensorRT", "safetensors"]),
}


def cases() -> Iterator[tuple[str, Write, list[str]]]:
    """Yield each kind, what makes it, and words of its refusal."""
    for name, model_type, why in ARCHITECTURES:
        config = AutoConfig.for_model(model_type).to_dict() | {"architectures": [name]}
        yield name, _writer(config), ["config.json: architectures", name, why, FAMILIES]
    for name, (fields, why) in REMOTE.items():
        yield name, _writer({**fields, "architectures": [name]}), ["config.json: architectures", name, why, FAMILIES]
    nano = json.loads((NANO / "config.json").read_text())
    for name, (fields, why) in QUANTIZED.items():
        place = "quantization" if name == "MLX" else "quantization_config"
        yield name, _writer({**nano, place: fields}), [f"config.json: {place}", why, "; take "]
    for name, (files, served, words) in FILES.items():
        yield name, _writer(nano, files, served), words


def _writer(config: dict[str, Any], files: dict[str, bytes | None] | None = None, served: str = "") -> Write:
    def write(directory: Path) -> Path:
        shutil.copytree(NANO, directory)
        (directory / "config.json").write_text(json.dumps(config))
        for name, content in (files or {}).items():
            if content is None:
                (directory / name).unlink()
            else:
                (directory / name).write_bytes(content)
        return directory / served

    return write
