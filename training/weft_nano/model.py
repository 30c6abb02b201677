"""The shape of Weft Nano, and how its weights are written: a Llama in Hugging Face format, BF16, in one file.

Knows nothing of data or training.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from training.weft_nano.tokenizer import BOS, EOS, MAX_TOKENS, PAD, START, TEMPLATE, VOCABULARY_SIZE, token_id

ROPE_THETA = 10000.0
SHAPE_KEYS = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "hidden_act max_position_embeddings rms_norm_eps tie_word_embeddings attention_bias mlp_bias initializer_range "
    "use_cache bos_token_id eos_token_id pad_token_id"
).split()


def make_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    bos, eos, pad = (token_id(tokenizer, t) for t in (BOS, EOS, PAD))
    return LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_TOKENS,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=pad,
        dtype="bfloat16",
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(make_config(tokenizer))


def _generation_config(config: LlamaConfig) -> dict[str, object]:
    return {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.9,
    }


def _config_json(config: LlamaConfig) -> dict[str, object]:
    content = {key: getattr(config, key) for key in SHAPE_KEYS}
    # rope_theta stands at the top level too, where readers of the older layout look for it; torch_dtype likewise.
    return content | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "rope_theta": ROPE_THETA,
    }


def _tokenizer_config() -> dict[str, object]:
    # No token is added to what is encoded: the template writes them all.
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_TOKENS,
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": [START],
        "clean_up_tokenization_spaces": False,
    }


def _json(content: dict[str, object]) -> str:
    return json.dumps(content, indent=2) + "\n"


def _replace(path: Path, text: str) -> None:
    temporary = path.with_suffix(path.suffix + ".part")
    temporary.write_text(text)
    temporary.replace(path)


def export(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Writes the checkpoint; each file is replaced in one move, so that a reader never sees half of one."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    temporary = out / "model.safetensors.part"
    save_file(weights, temporary, metadata={"format": "pt"})
    temporary.chmod(0o644)
    _replace(out / "tokenizer.json", tokenizer.backend_tokenizer.to_str(pretty=True) + "\n")
    _replace(out / "tokenizer_config.json", _json(_tokenizer_config()))
    _replace(out / "chat_template.jinja", TEMPLATE.read_text())
    _replace(out / "config.json", _json(_config_json(model.config)))
    _replace(out / "generation_config.json", _json(_generation_config(model.config)))
    temporary.replace(out / "model.safetensors")
